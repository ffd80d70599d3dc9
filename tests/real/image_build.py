"""Build the project's image from its Dockerfile with podman, on local replacements of the two public bases. Nothing is pulled.

Both bases consist of Debian's packages in the layout of the public images. The build base has its Python in /usr/local, pip's
wheel and a shell, like python:3.13-slim-trixie. The other base has its Python in /usr and no shell, like
gcr.io/distroless/python3-debian13:nonroot. Built images are in `${XDG_CACHE_HOME:-~/.cache}/gpu-plugin-e2e`, one archive for
each state of the sources and each name. `install` builds, and the tests only read.
"""

import fcntl
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.harness.binaries import MissingError, cache_directory, program
from tests.real import archive
from tests.real import podman as podman_module

ROOT = Path(__file__).parents[2]
SOURCES = (
    *("Dockerfile", ".dockerignore", "gpu_plugin", "requirements/build.lock", "requirements/run.lock"),
    *("pyproject.toml", "README.md", "LICENSE"),
)
"""The Dockerfile and all files that it copies."""

BUILD_BASE, BASE = "localhost/gpu-plugin-test/build-base:1", "localhost/gpu-plugin-test/base:1"

BASES = {BUILD_BASE: archive.BUILD_SYSTEM, BASE: archive.RUN_SYSTEM}
"""The packages of each base."""

PYTHON_2 = "usr/share/python2/hello.py"
"""A file of the base that Python 3 cannot compile. Debian's package git has such files."""

_PATH = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONFIGURATIONS = {
    BUILD_BASE: (_PATH, "ENV LANG=C.UTF-8", 'CMD ["python3"]'),
    BASE: (_PATH, "ENV LANG=C.UTF-8", "USER 65532", "WORKDIR /home/nonroot", 'ENTRYPOINT ["/usr/bin/python3"]'),
}
"""The configuration of each base, as in the public image."""

TAG = "localhost/gpu-plugin-test/gpu-plugin:1"

SUCCESSOR, SUCCESSOR_VERSION = "localhost/gpu-plugin-test/gpu-plugin:2", "7.8.9"
"""The image after an upgrade."""

LIMITS = ("--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")
"""Options that `podman run` needs on a machine with restricted rights."""

AGAIN = "localhost/gpu-plugin-test/again:1"
"""The image built a second time from the same sources and bases."""

UNUSED_SECONDS = 24 * 3600
"""An archive is removed when no build and no test has used it for this time. The archives of active checkouts stay."""

REVISION, CREATED = "0123456789abcdef0123456789abcdef01234567", "2024-02-29T12:00:00Z"
"""Labels of the test image."""

EPOCH = 1577836800
"""The time of all files that the build adds, in seconds: 2020."""


def podman(storage: Path) -> list[str]:
    """Return the start of a podman command that stores images and containers below `storage`, with options for this machine.

    The storage driver is overlay if the file system and the kernel support it, else vfs, which copies all files for each layer.
    """
    command = ["podman", f"--root={storage / 'storage'}", f"--runroot={storage / 'run'}"]
    command += ["--cgroup-manager=cgroupfs", f"--runtime={program('runc')}", "--log-level=error"]
    overlay = [*command, "--storage-driver=overlay"]
    tried = subprocess.run([*overlay, "info"], capture_output=True, env=_environment(), check=False, timeout=60)
    return overlay if tried.returncode == 0 else [*command, "--storage-driver=vfs"]


def run(command: Sequence[str], *, timeout: float = 600) -> str:
    """Run a command and return its standard output. Raises AssertionError with its messages if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def cleared(command: Sequence[str], storage: Path) -> None:
    """Remove containers, images and mounts at the end, also after a failed build, so that `storage` can be removed."""
    run([*command, "rm", "--all", "--force", "--time=0"])
    run([*command, "rmi", "--all", "--force"])
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((each for each in mounts if Path(each).is_relative_to(storage)), reverse=True):
        run(["umount", mount])


def find(tag: str = TAG, version: str | None = None) -> Path:
    """Return the OCI archive of the image of the present checkout.

    Args:
        tag: the image's name in the archive.
        version: the version in the image, such as 0.1.1, for tests of an upgrade. Its code, package metadata and bill of
            materials are the checkout's, except for `gpu_plugin.__version__`.

    Raises:
        MissingError: the archive was not built yet.
    """
    place = _place(tag, version)
    try:
        os.utime(place)  # sets the time of the last use, which `install` reads
    except FileNotFoundError:
        raise MissingError(f"not on this machine: the image {tag} of this checkout") from None
    return place


def install(say: Callable[[str], None], tag: str = TAG, version: str | None = None) -> Path:
    """Build the archive if it is missing, and return it.

    A build takes about a minute, and uses the package index of this machine's pip. An image with another name or version is
    made from the same build within seconds, except `AGAIN`.

    Raises:
        MissingError: the user is not root, podman or a base is missing, or the build failed. The text has the reason.
    """
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    place = _place(tag, version)
    with _locked(cache / "image.lock"):
        try:
            if not place.is_file():
                _install(place, say, tag, version)
            for each in {_place(TAG, None), place}:
                os.utime(each)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            raise MissingError(f"the image {tag}: {error}") from error
        for archived in cache.glob("image-*.tar"):
            if time.time() - archived.stat().st_mtime > UNUSED_SECONDS:
                archived.unlink()
    return place


def _install(place: Path, say: Callable[[str], None], tag: str, version: str | None) -> None:
    if os.geteuid() != 0:
        raise MissingError("the build of an image needs root")
    podman_module.find()
    bases = {name: archive.debian_system(packages) for name, packages in BASES.items()}
    first = _place(TAG, None)
    if not first.is_file():
        say("building the image of this checkout: about a minute")
        with _making(first) as (making, at, command):
            _build(making, at, command, bases, TAG)
    if place != first:
        with _making(place) as (making, at, command):
            if tag == AGAIN:
                say("building it again: about a minute")
                _build(making, at, command, bases, tag)
            else:
                _derive(making, at, command, first, tag, version)


def _place(tag: str, version: str | None) -> Path:
    name = f"image-{_key()}"
    return cache_directory() / (
        f"{name}.tar" if (tag, version) == (TAG, None) else f"{name}-{_digest(f'{tag} {version}')}.tar"
    )


def _key() -> str:
    digest = hashlib.sha256(" ".join(map(archive.system_name, BASES.values())).encode())
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
    """Yield a path for an archive, a directory for files, and the start of a podman command. Move the archive to `place`."""
    making = place.with_name("image.tar.making")  # the lock allows one build at a time
    with tempfile.TemporaryDirectory(prefix="gpi-", dir="/tmp") as scratch:  # podman needs short paths
        at = Path(scratch)
        command = podman(at)
        try:
            yield making, at, command
            making.rename(place)
        finally:
            making.unlink(missing_ok=True)
            cleared(command, at)


def _build(making: Path, at: Path, command: Sequence[str], bases: Mapping[str, Path], tag: str) -> None:
    for name, system in bases.items():
        more = {} if name == BUILD_BASE else {PYTHON_2: b"print 'hello'\n"}
        tar = tarred(system, at / "base.tar", more, local_python=name == BUILD_BASE)
        run([*command, "import", *(f"--change={each}" for each in CONFIGURATIONS[name]), str(tar), name])
    options = [f"--build-arg={name}={value}" for name, value in _arguments().items()]
    options += ["--isolation=chroot", "--network=host", f"--timestamp={EPOCH}", f"--tag={tag}", *_index(at)]
    run([*command, "build", *options, f"--file={ROOT / 'Dockerfile'}", str(ROOT)])
    run([*command, "save", "--format=oci-archive", f"--output={making}", tag])


_SAY = """
import pathlib, py_compile, re, sys, gpu_plugin
source = pathlib.Path(gpu_plugin.__file__)
source.write_text(re.sub('__version__ = ".+"', f'__version__ = "{sys.argv[1]}"', source.read_text(), count=1))
py_compile.compile(str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""


def _derive(making: Path, at: Path, command: Sequence[str], first: Path, tag: str, version: str | None) -> None:
    """Save the image of `first` under another name, and with another version if `version` is given."""
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
    return {"BUILD_BASE": BUILD_BASE, "BASE": BASE, "VERSION": version[1], "REVISION": REVISION, "CREATED": CREATED}


def tarred(system: Path, at: Path, more: Mapping[str, bytes] = {}, *, local_python: bool) -> Path:
    """Write an archive of a root directory for `podman import`, and add the directories for mounts that the root lacks.

    Args:
        system: the root directory.
        at: the archive to write.
        more: additional files by their paths without the first slash.
        local_python: if True, move its Python from /usr to /usr/local.
    """

    def placed(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.name = _PYTHON.sub(r"./usr/local/\1", entry.name)
        return entry

    with tarfile.open(at, "w") as tar:
        tar.add(system, arcname=".", filter=placed if local_python else None)
        for name in ("dev", "proc", "sys", "tmp", "run", "root"):
            if not (system / name).exists():
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(entry)
        for name, content in more.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return at


_PYTHON = re.compile(r"^\./usr/((?:bin|lib)/python3)")


def _index(at: Path) -> list[str]:
    """Return options that give pip in the build the settings of this machine's pip as a secret, and its files as volumes."""
    output = run([sys.executable, "-m", "pip", "config", "list"])
    settings = dict(line.partition("=")[::2] for line in output.splitlines() if "=" in line)
    # `global.cert='...'`, `:env:.cert='...'`: the value of the environment is last and wins
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
    """Return podman's environment: this machine's variables for proxies and pip, HOME, LANG and PATH."""
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
