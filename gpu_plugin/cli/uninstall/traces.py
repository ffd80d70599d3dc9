"""What `gpu-plugin run` leaves on a node, and its removal. Every call blocks for as long as the disk does."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from gpu_plugin import __version__, control
from gpu_plugin.cluster.labels.features_file import FEATURES_FILE, AwayError, FeaturesFile, WrittenFiles
from gpu_plugin.control import LOCK
from gpu_plugin.daemon.state_files import FILES as KEPT_FILES
from gpu_plugin.host.cdi.directory import SpecDirectory, not_ours
from gpu_plugin.kubelet.socket import PREFIX, remove_stale
from gpu_plugin.runtime.regular_file import leftovers
from gpu_plugin.state.directory import CORRUPT, StateDirectory
from gpu_plugin.state.node_lock import CLAIM, HANDOVER, NodeLock

FILES = (*KEPT_FILES, LOCK, CLAIM, HANDOVER)
"""What a daemon writes in its state directory, besides its control socket."""

SIMULATED_FILES = ("simulated-node.json", "simulated-compute-modes.json", "simulated-compute-modes.lock")
SIMULATED_DIRECTORIES = ("dev", "driver-root")
"""What a simulated node adds there (`hardware`, `compute_modes`, `device_nodes` and `driver_files` of `simulation`)."""


class Removal(msgspec.Struct):
    """Paths that were removed, and a sentence for each thing that is still there."""

    removed: list[str] = []
    left: list[str] = []
    out_of_reach: list[str] = []
    """A sentence for each thing that may still be on the node, where trying again as it is would bring nothing."""

    def attempt(self, path: Path, remove: Callable[[Path], object]) -> None:
        """Removes what may be at a path, and notes what came of it; nothing where `remove` returns False."""
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
    """Removes what a daemon that runs no longer has left in these directories, and the first one where it is empty then.

    Files that are not this plugin's stay. Where a daemon still runs with `state_dir` or `socket_dir`, nothing is removed; where
    none does, `before` is called first.
    """
    with _locked(state_dir, socket_dir) as why:
        if why:
            return Removal(left=[why])
        before()
        return _removed(state_dir, cdi_dir, socket_dir, features_dir)


def running(state_dir: Path, socket_dir: Path) -> str:
    """Which daemon runs with these directories, in a sentence; empty where none does."""
    with _locked(state_dir, socket_dir) as why:
        return why


@contextmanager
def _locked(state_dir: Path, socket_dir: Path) -> Iterator[str]:
    """Holds a daemon's locks, unless one runs: then it gives which, in a sentence."""
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
    """Removes the files of labels. Returns whether the state directory has to remember one that is still there."""
    written, memory = WrittenFiles(StateDirectory(state_dir)), state_dir / FEATURES_FILE
    written.load()
    for directory in sorted({features_dir, *map(Path, written.directories())}):
        file = FeaturesFile(directory, written)
        try:
            if file.remove():
                done.removed.append(str(file.path))
        except AwayError as error:
            done.out_of_reach.append(
                f"{file.path}: {error.strerror}: on the node, remove {file.path}, if there is one, and then "
                f"{memory.name} in the state directory; or mount the directory and run this again"
            )
        except OSError as error:
            again = f"; {memory} stays, so that running this again finds it" if written.remembers(file.path) else ""
            done.left.append(f"{file.path}: {error.strerror or error}{again}")
    remembered = bool(written.directories())
    if remembered:
        written.keep()
    return remembered


def _state(state_dir: Path) -> list[Path]:
    """The files and directories of ours in the state directory."""
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
    """Why a path is still there, and by which name in it, where that is known: such a name may be relative to any directory."""
    inner = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else ""
    why = error.strerror or str(error)
    return f"{why} ({inner})" if inner and inner != str(path) else why


def _remove(path: Path) -> None:
    """Removes a file, a link or a directory with all that is in it."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_empty(directory: Path, kept: Collection[Path] = ()) -> bool:
    """Removes an empty directory. Returns whether it did; it does not where the directory holds but what is `kept`.

    Raises OSError, whose `strerror` says what else it holds, or that it is a link.
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
            raise OSError(errno.ENOTEMPTY, f"holds what is not this plugin's: {shown}") from None
        return False
    return True
