"""The files that `gpu-plugin run` leaves on a node, and their removal. Every call blocks as long as the disk does."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from gpu_plugin import __version__
from gpu_plugin.cluster.labels.features_file import FEATURES_FILE, AwayError, FeaturesFile, WrittenFiles
from gpu_plugin.containers.cdi_files.directory import SpecDirectory, not_ours
from gpu_plugin.daemon.state_files import FILES as KEPT_FILES
from gpu_plugin.kubelet.socket import PREFIX, remove_stale
from gpu_plugin.runtime import control
from gpu_plugin.runtime.control import LOCK
from gpu_plugin.runtime.regular_file import leftovers
from gpu_plugin.state.directory import CORRUPT, StateDirectory
from gpu_plugin.state.node_lock import CLAIM, HANDOVER, NodeLock

FILES = (*KEPT_FILES, LOCK, CLAIM, HANDOVER)  # the files of a daemon in its state directory, except its control socket

SIMULATED_FILES = ("simulated-node.json", "simulated-compute-modes.json", "simulated-compute-modes.lock")
# The additional files of a simulated node (`hardware`, `compute_modes`, `device_nodes` and `driver_files` of `simulation`)
SIMULATED_DIRECTORIES = ("dev", "driver-root")


class Removal(msgspec.Struct):
    """The paths that were removed, and a sentence for each path that remains."""

    removed: list[str] = []
    left: list[str] = []
    out_of_reach: list[str] = []
    """A sentence for each path that may remain on the node, and that a second attempt would not remove either."""

    def attempt(self, path: Path, remove: Callable[[Path], object]) -> None:
        """Remove a path and record the result. Record nothing if the path is missing or `remove` returns False."""
        try:
            removed = remove(path) is not False
        except FileNotFoundError:
            return
        except OSError as error:
            self.left.append(f"{path}: {_reason(error, path)}")
        else:
            if removed:
                self.removed.append(str(path))


def remove_traces(
    state_dir: Path,
    cdi_dir: Path,
    socket_dir: Path,
    features_dir: Path | None = None,
    before: Callable[[], object] = lambda: None,
) -> Removal:
    """Remove the files of a daemon that has ended from these directories, and the state directory if it is then empty.

    Files of other programs stay. If a daemon still runs with `state_dir` or `socket_dir`, nothing is removed. Otherwise
    `before` is called first.
    """
    with _locked(state_dir, socket_dir) as why:
        if why:
            return Removal(left=[why])
        before()
        return _removed(state_dir, cdi_dir, socket_dir, features_dir)


def running(state_dir: Path, socket_dir: Path) -> str:
    """Return a sentence about the daemon that runs with these directories, empty without such a daemon."""
    with _locked(state_dir, socket_dir) as why:
        return why


@contextmanager
def _locked(state_dir: Path, socket_dir: Path) -> Iterator[str]:
    """Hold a daemon's locks and yield an empty text. If a daemon runs, yield a sentence about it."""
    lock = NodeLock(state_dir, socket_dir, __version__)
    try:
        if control.answers(state_dir):
            yield f"{state_dir}: a daemon is running with this state directory: stop it first"
        else:
            why = lock.take(make=False)
            yield f"{state_dir}: a daemon is running: {why}" if why else ""
    finally:
        lock.release()


def _removed(state_dir: Path, cdi_dir: Path, socket_dir: Path, features_dir: Path | None) -> Removal:
    specs = SpecDirectory(cdi_dir).remove()
    done = Removal([str(cdi_dir / name) for name in specs.changed], list(specs.refused.values()))
    done.out_of_reach += [not_ours(cdi_dir / name) for name in specs.foreign]
    done.removed += [str(socket_dir / name) for name in remove_stale(socket_dir)]
    done.left += [
        f"{path}: a socket that is in use, or cannot be removed" for path in sorted(socket_dir.glob(f"{PREFIX}*.sock"))
    ]
    kept: frozenset[Path] = frozenset()
    if features_dir is not None and _remove_labels(state_dir, features_dir, done):
        kept = frozenset({state_dir / FEATURES_FILE})
    for path in _state(state_dir):
        if path not in kept:
            done.attempt(path, _remove)
    done.attempt(state_dir, partial(remove_empty, kept=kept))
    return done


def _remove_labels(state_dir: Path, features_dir: Path, done: Removal) -> bool:
    """Remove the files of labels. Return True if the state directory must keep the record of a file that remains."""
    state, memory = StateDirectory(state_dir), state_dir / FEATURES_FILE
    written = state.read(FEATURES_FILE, WrittenFiles) or WrittenFiles()
    for directory in sorted({features_dir, *map(Path, written.directories())}):
        file = FeaturesFile(directory, written)
        try:
            removed, digests = file.remove()
        except AwayError as error:
            done.out_of_reach.append(
                f"{file.path}: {error.strerror}: on the node, remove {file.path}, if there is one, and then "
                f"{memory.name} in the state directory; or mount the directory and run this again"
            )
        except OSError as error:
            known = str(directory) in written.directories()
            again = f"; {memory} stays, so that running this again finds it" if known else ""
            done.left.append(f"{file.path}: {error.strerror or error}{again}")
        else:
            written = written.updated(file.path, digests)
            if removed:
                done.removed.append(str(file.path))
    must_keep = bool(written.directories())
    if must_keep:
        state.write(FEATURES_FILE, written)
    return must_keep


def _state(state_dir: Path) -> list[Path]:
    """Return the files and directories of this plugin in the state directory."""
    names = (*FILES, *SIMULATED_FILES)
    ours = [f"{name}{end}" for name in (*names, control.SOCKET) for end in ("", *CORRUPT)]
    try:
        there = set(os.listdir(state_dir))  # noqa: PTH208 - names alone
        temporary = [*leftovers(state_dir, names)]
    except OSError:  # the removal of the directory gives the reason
        return []
    if SIMULATED_FILES[0] in there:
        ours = [*SIMULATED_DIRECTORIES, *ours]
    return [*(state_dir / name for name in ours if name in there), *temporary]


def _reason(error: OSError, path: Path) -> str:
    """Return the reason why a path remains, with the file in it that caused the error, which may be relative."""
    inner = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else ""
    why = error.strerror or str(error)
    return f"{why} ({inner})" if inner and inner != str(path) else why


def _remove(path: Path) -> None:
    """Remove a file, a link, or a directory with its content."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_empty(directory: Path, kept: Collection[Path] = ()) -> bool:
    """Remove an empty directory. Return False if it stays because it contains only the `kept` files.

    Raises OSError if it contains other files, which `strerror` names, or is a link.
    """
    if directory.is_symlink():
        raise OSError(errno.ENOTDIR, f"is a link to {directory.readlink()}: remove both by hand")
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        names = sorted(set(os.listdir(directory)) - {path.name for path in kept})  # noqa: PTH208 - names alone
        if names:
            shown = f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            raise OSError(errno.ENOTEMPTY, f"contains files that are not this plugin's: {shown}") from None
        return False
    return True
