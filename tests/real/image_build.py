"""The project's image, built by podman from its Dockerfile on bases made on the spot: nothing is pulled.

The build base is a small Debian with Python, pip's wheel and a shell; the run base has a Python and neither of these. What was
built lies in `${XDG_CACHE_HOME:-~/.cache}/gpu-plugin-e2e`, one archive for each state of what goes in and each name.
"""

import fcntl
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.harness.binaries import cache_directory
from tests.real import archive
from tests.real.podman import NoPodmanError, install, program

ROOT = Path(__file__).parents[2]
SOURCES = (
    *("Dockerfile", ".dockerignore", "gpu_plugin", "image", "requirements/build.lock", "requirements/run.lock"),
    *("pyproject.toml", "README.md", "LICENSE"),
)
"""What goes into the image: what the Dockerfile copies, and itself."""

BUILD_BASE, RUN_BASE = "localhost/gpu-plugin-test/build-base:1", "localhost/gpu-plugin-test/run-base:1"

TAG = "localhost/gpu-plugin-test/gpu-plugin:1"

LIMITS = ("--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")
"""What `podman run` needs where the machine grants no more."""

KEPT = 5
"""Older archives that stay: two checkouts may be at work, each with up to three names."""

REVISION, CREATED = "0123456789abcdef0123456789abcdef01234567", "2024-02-29T12:00:00Z"
"""What the test image says of itself, so that it is seen to arrive."""


class NoImageError(Exception):
    """The image cannot be built here; the text says why."""


def podman(storage: Path) -> list[str]:
    """The start of a podman command whose images and containers lie below `storage`, with what works here.

    The storage driver overlay where the file system and the kernel have it, otherwise vfs, which copies all files for each layer.
    """
    command = ["podman", f"--root={storage / 'storage'}", f"--runroot={storage / 'run'}"]
    command += ["--cgroup-manager=cgroupfs", f"--runtime={program('runc')}", "--log-level=error"]
    overlay = [*command, "--storage-driver=overlay"]
    tried = subprocess.run([*overlay, "info"], capture_output=True, env=_environment(), check=False, timeout=60)
    return overlay if tried.returncode == 0 else [*command, "--storage-driver=vfs"]


def run(command: Sequence[str], *, timeout: float = 600) -> str:
    """What a command prints. Raises AssertionError with what it complained of where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def cleared(command: Sequence[str], storage: Path) -> None:
    """Takes containers, images and mounts away, those of a build that failed half way too, so that `storage` can be removed."""
    run([*command, "rm", "--all", "--force", "--time=0"])
    run([*command, "rmi", "--all", "--force"])
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((each for each in mounts if Path(each).is_relative_to(storage)), reverse=True):
        run(["umount", mount])


def built(tag: str = TAG, version: str | None = None) -> Path:
    """An OCI archive of the image as the checkout is now, called `tag` in it; made now where it is not in the cache.

    A build takes about a minute, and asks the package index that pip on this machine asks. Another name or another version is
    made of the same build within seconds.

    Args:
        tag: its name.
        version: what it says of itself, such as 0.1.1: the version of an image to upgrade to. Its code is the checkout's,
            but for `gpu_plugin.__version__`; its package metadata and bill of materials are those of the checkout too.

    Raises:
        NoImageError: this is no root, there is no podman or no base, or what is missing may not be installed.
    """
    if os.geteuid() != 0:
        raise NoImageError("building an image needs root")
    try:
        install()
        bases = {
            BUILD_BASE: archive.debian_system(archive.BUILD_SYSTEM),
            RUN_BASE: archive.debian_system(archive.RUN_SYSTEM),
        }
    except (NoPodmanError, archive.NoArchiveError) as error:
        raise NoImageError(str(error)) from None
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    key = _key(bases.values())
    first = cache / f"image-{key}.tar"
    place = cache / f"image-{key}-{_digest(f'{tag} {version}')}.tar" if (tag, version) != (TAG, None) else first
    with _locked(cache / "image.lock"):
        if not place.is_file():
            if not first.is_file():
                with _making(first) as (making, at, command):
                    _build(making, at, command, bases)
            if place != first:
                with _making(place) as (making, at, command):
                    _derive(making, at, command, first, tag, version)
        for each in {first, place}:
            each.touch()
        for older in sorted(cache.glob("image-*.tar"), key=lambda each: each.stat().st_mtime)[: -KEPT - 1]:
            older.unlink()
    return place


def _key(bases: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"{' '.join(map(str, bases))}".encode())
    for path in _files():
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_mode}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _files() -> Iterator[Path]:
    for name in SOURCES:
        path = ROOT / name
        inner = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (each for each in inner if each.is_file() and "__pycache__" not in each.parts)


@contextmanager
def _making(place: Path) -> Iterator[tuple[Path, Path, list[str]]]:
    """Where to write an archive that then comes to `place`, a directory for files, and the start of a podman command there."""
    making = place.with_name("image.tar.making")  # one at a time, by the lock
    making.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpi-", dir="/tmp") as scratch:  # podman wants short paths
        at = Path(scratch)
        command = podman(at)
        try:
            yield making, at, command
        finally:
            cleared(command, at)
    making.rename(place)


def _build(making: Path, at: Path, command: Sequence[str], bases: Mapping[str, Path]) -> None:
    for name, system in bases.items():
        run([*command, "import", str(tarred(system, at / "base.tar")), name])
    options = [f"--build-arg={name}={value}" for name, value in _arguments().items()]
    options += ["--isolation=chroot", "--network=host", f"--tag={TAG}", *_index(at)]
    run([*command, "build", *options, f"--file={ROOT / 'Dockerfile'}", str(ROOT)])
    run([*command, "save", "--format=oci-archive", f"--output={making}", TAG])


_SAY = """
import pathlib, py_compile, re, sys, gpu_plugin
source = pathlib.Path(gpu_plugin.__file__)
source.write_text(re.sub('__version__ = ".+"', f'__version__ = "{sys.argv[1]}"', source.read_text(), count=1))
py_compile.compile(str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""


def _derive(making: Path, at: Path, command: Sequence[str], first: Path, tag: str, version: str | None) -> None:
    """The image of `first` under another name, and of another version where one is given."""
    run([*command, "load", f"--input={first}"])
    if version is None:
        run([*command, "tag", TAG, tag])
    else:
        say = json.dumps(["/opt/gpu-plugin/bin/python3", "-I", "-c", _SAY, version])  # there is no shell in the image
        label = f"LABEL org.opencontainers.image.version={json.dumps(version)}"
        (at / "Dockerfile").write_text(f"FROM {TAG}\n{label}\nUSER 0:0\nRUN {say}\nUSER 65532:65532\n")
        run(
            [
                *command,
                "build",
                "--isolation=chroot",
                "--network=host",
                f"--tag={tag}",
                f"--file={at / 'Dockerfile'}",
                str(at),
            ]
        )
    run([*command, "save", "--format=oci-archive", f"--output={making}", tag])


def _arguments() -> dict[str, str]:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "gpu_plugin/__init__.py").read_text())
    assert version is not None
    return {"BASE": BUILD_BASE, "RUN_BASE": RUN_BASE, "VERSION": version[1], "REVISION": REVISION, "CREATED": CREATED}


def tarred(system: Path, at: Path) -> Path:
    """A root directory as `podman import` takes it, with the directories for mounts that an unpacked one lacks."""
    with tarfile.open(at, "w") as tar:
        tar.add(system, arcname=".")
        for name in ("dev", "proc", "sys", "tmp", "run", "root"):
            if not (system / name).exists():
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(entry)
    return at


def _index(at: Path) -> list[str]:
    """Options by which pip in the build asks what this machine's pip asks: its settings as a secret, its files as volumes."""
    said = run([sys.executable, "-m", "pip", "config", "list"])
    settings = dict(line.partition("=")[::2] for line in said.splitlines() if "=" in line)
    # `global.cert='...'`, `:env:.cert='...'`: what the environment says, last, wins
    plain = {key.rpartition(".")[2]: " ".join(shlex.split(value)) for key, value in settings.items()}
    options = []
    if certificate := plain.pop("cert", ""):
        options.append(f"--secret=id=ca.pem,src={certificate}")
    found = (each for each in plain.get("find-links", "").split() if Path(each).is_dir())
    options += [f"--volume={directory}:{directory}:ro" for directory in found]
    lines = [f"{key} = {value}" for key, value in plain.items()]
    lines += ["cert = /run/secrets/ca.pem"] if certificate else []
    file = at / "pip.conf"
    file.write_text("\n".join(["[global]", *lines, ""]))
    return [*options, f"--secret=id=pip.conf,src={file}"]


def _environment() -> dict[str, str]:
    """Podman's: nothing of ours but how this machine reaches others, and how pip on it is set up."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower().endswith("_proxy") or name in {"HOME", "LANG"}
    }
    return kept | {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
