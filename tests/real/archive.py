"""Download and unpack Debian's packages of NVIDIA's driver user space. They are not installed on this machine.

The packages are in the archive's components contrib and non-free, which a machine need not have enabled. apt therefore gets
separate lists, a separate cache and separate sources, made from the machine's sources. `install` downloads into
`${XDG_CACHE_HOME:-~/.cache}/gpu-plugin-nvidia`, so that only a machine's first run downloads (12 MB, a few seconds). The tests
only read.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.harness.binaries import MissingError

PACKAGES = (
    "libcuda1",
    "libcudadebugger1",
    "libegl-nvidia0",
    "libnvcuvid1",
    "libnvidia-allocator1",
    "libnvidia-cfg1",
    "libnvidia-encode1",
    "libnvidia-ml1",
    "libnvidia-opticalflow1",
    "libnvidia-ptxjitcompiler1",
    "nvidia-cuda-mps",
    "nvidia-egl-icd",
    "nvidia-persistenced",
    "nvidia-smi",
    "nvidia-vulkan-icd",
)
"""Packages with the files of a CDI specification and the MPS daemons, without large packages (nvvm, GSP firmware, graphics)."""

SYSTEM = ("dash", "libpython3-stdlib", "python3-minimal")
"""Packages for containers: a Python with ctypes, a shell, and their dependencies."""

BUILD_SYSTEM = (*SYSTEM, "ca-certificates", "coreutils", "python3-venv", "sed")
"""Packages for the build of an image: a shell and its commands, and virtual environments with pip."""

RUN_SYSTEM = ("base-files", "ca-certificates", "libpython3-stdlib", "python3-minimal")
"""Packages of the image's base, as in a distroless image: a Python, without a shell and without pip."""

_NEEDED = re.compile(
    r"base-files|ca-certificates|coreutils|dash|gcc-\d+-base|sed|zlib1g|(?:lib)?python3.*"
    r"|lib(?:acl1|attr1|bz2-1\.0|c6|crypt1|expat1|ffi\d+|gcc-s1|gmp10|lzma5|pcre2-8-0|selinux1|ssl\d.*)"
)
"""The dependencies that a running Python loads: not dpkg, Perl, or packages that only maintainers' scripts call."""

MULTIARCH = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
"""Debian's library directory by Debian's name of the processor."""


def unpacked() -> Path:
    """Return a directory with the unpacked packages, laid out as below a Debian machine's root. Raises MissingError."""
    return _found(_place("driver", PACKAGES))


def debian_system(packages: Sequence[str] = SYSTEM) -> Path:
    """Return the root of a small Debian system that is unpacked and not configured: ldconfig did not run. Raises MissingError."""
    return _found(_place("debian", packages))


def system_name(packages: Sequence[str]) -> str:
    """Return the name of a system with these packages, which need not be downloaded."""
    return _place("debian", packages).name


def install(say: Callable[[str], None]) -> None:
    """Download the driver and all systems that are missing.

    Raises:
        MissingError: the machine is not Debian, or its archive is unreachable or does not have the packages.
    """
    if absent := [name for name in ("apt-get", "dpkg", "dpkg-deb") if shutil.which(name) is None]:
        raise MissingError(f"NVIDIA's libraries come from Debian's archive, and there is no {absent[0]} here")
    cached = cache_directory()
    cached.mkdir(parents=True, exist_ok=True)
    with _locked(cached / "lock"):
        wanted = [PACKAGES, SYSTEM, BUILD_SYSTEM, RUN_SYSTEM]
        missing = {root: packages for packages in wanted if not (root := _root(packages)).is_dir()}
        if not missing:
            return
        say(f"fetching {sum(map(len, missing.values()))} packages and what they need from Debian's archive")
        try:
            with tempfile.TemporaryDirectory(dir=cached) as scratch:
                options = _private_apt(Path(scratch))
                _run("apt-get", *options, "update")
                for root, packages in missing.items():
                    _fetch(root, packages, options)
        except (OSError, subprocess.SubprocessError) as error:
            raise MissingError(f"packages cannot be fetched from Debian's archive: {_said(error)}") from error


def _root(packages: Sequence[str]) -> Path:
    return _place("driver" if packages is PACKAGES else "debian", packages)


def _place(what: str, packages: Sequence[str]) -> Path:
    return cache_directory() / f"{what}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:12]}"


def _found(root: Path) -> Path:
    if not root.is_dir():
        raise MissingError(f"not on this machine: Debian's packages in {root}")
    return root


def _said(error: Exception) -> str:
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    return " ".join((output or str(error)).split()[-60:])


def multiarch() -> str:
    """Return the name of this machine's library directory, such as x86_64-linux-gnu."""
    return MULTIARCH[_run("dpkg", "--print-architecture").strip()]


def version(root: Path) -> str:
    """Return the driver version of the unpacked libraries, such as 535.309.01."""
    (library,) = (root / "usr/lib" / multiarch() / "nvidia/current").glob("libcuda.so.*.*")
    return library.name.removeprefix("libcuda.so.")


def debian_root(root: Path) -> Path:
    """Create a driver root with Debian's layout at `root`: nvidia/current, and the links of its alternatives.

    The links are the links that the packages' scripts create with update-alternatives: absolute links through etc/alternatives.
    """
    shutil.copytree(unpacked(), root, symlinks=True)
    libraries = root / "usr/lib" / multiarch()
    alternatives = root / "etc/alternatives"
    alternatives.mkdir(parents=True)
    links = {f"usr/lib/{multiarch()}/{name}": name for name in _names(libraries / "nvidia/current") if _slave(name)}
    for link, name in links.items():
        alternative = f"nvidia--{name}-{multiarch()}"
        (alternatives / alternative).symlink_to(f"/usr/lib/{multiarch()}/nvidia/current/{name}")
        (root / link).symlink_to(f"/etc/alternatives/{alternative}")
    (alternatives / "nvidia--nvidia-smi").symlink_to("/usr/lib/nvidia/current/nvidia-smi")
    (root / "usr/bin/nvidia-smi").symlink_to("/etc/alternatives/nvidia--nvidia-smi")
    return root


def installer_root(root: Path) -> Path:
    """Create a driver root like NVIDIA's .run installer on a distribution with usr/lib64: files and links in one directory."""
    libraries = root / "usr/lib64"
    libraries.mkdir(parents=True)
    for name in _names(unpacked() / "usr/lib" / multiarch() / "nvidia/current"):
        source = unpacked() / "usr/lib" / multiarch() / "nvidia/current" / name
        shutil.copy2(source, libraries / name, follow_symlinks=False)
    (root / "usr/bin").mkdir()
    for program in (
        "usr/bin/nvidia-cuda-mps-control",
        "usr/bin/nvidia-persistenced",
        "usr/sbin/nvidia-cuda-mps-server",
    ):
        shutil.copy2(unpacked() / program, root / "usr/bin")
    shutil.copy2(unpacked() / "usr/lib/nvidia/current/nvidia-smi", root / "usr/bin")
    return root


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _slave(name: str) -> bool:
    """Return True if Debian's alternatives have a link of this name: the name ends with one number, or is libcuda.so."""
    return name == "libcuda.so" or name.rpartition(".so.")[2].isdecimal()


def _fetch(root: Path, packages: Sequence[str], options: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        at = Path(scratch)
        downloads = at / "downloads"
        downloads.mkdir()
        system = packages is not PACKAGES
        if system:
            packages = _with_what_they_need(packages, options)
        _run("apt-get", *options, "download", *packages, directory=downloads)
        tree = at / "tree"
        if system:  # as on every system that is newer than the paths in the packages
            for directory in ("bin", "lib", "lib64", "sbin"):
                (tree / "usr" / directory).mkdir(parents=True)
                (tree / directory).symlink_to(f"usr/{directory}")
        tree.mkdir(exist_ok=True)
        for package in sorted(downloads.glob("*.deb")):
            content = at / "content.tar"
            with content.open("wb") as archive:
                subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], check=True, stdout=archive, timeout=300)
            _run("tar", "--extract", "--keep-directory-symlink", f"--file={content}", f"--directory={tree}")
        tree.rename(root)


def _with_what_they_need(packages: Sequence[str], options: Sequence[str]) -> Sequence[str]:
    output = _run("apt-cache", *options, "depends", "--recurse", "--important", *packages)
    names = {line for line in output.splitlines() if not line.startswith((" ", "<"))}
    return sorted(name for name in names if _NEEDED.fullmatch(name))


def _private_apt(at: Path) -> Sequence[str]:
    """Return options that make apt use lists, cache and sources below `at`, with all components of Debian's archives."""
    listed = _run(
        "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT) $(LABEL)", "Created-By: Packages"
    )
    # The label may have several words (Debian, Debian-Security). Other archives do not have these components.
    found = {
        tuple(fields[:2])
        for fields in map(str.split, listed.splitlines())
        if fields[2] == "main" and fields[3].startswith("Debian")
    }
    if not found:
        raise MissingError("this machine's apt knows no archive of Debian's")
    components = "main contrib non-free non-free-firmware"
    (at / "sources.list").write_text("".join(f"deb {uri} {release} {components}\n" for uri, release in sorted(found)))
    for directory in ("lists/partial", "cache/archives/partial"):
        (at / directory).mkdir(parents=True)
    return (
        f"--option=Dir::Etc::sourcelist={at / 'sources.list'}",
        "--option=Dir::Etc::sourceparts=-",
        f"--option=Dir::State::Lists={at / 'lists'}",
        f"--option=Dir::Cache={at / 'cache'}",
        "--option=APT::Sandbox::User=root",
    )


def _run(*command: str, directory: Path | None = None) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory, timeout=300).stdout


def cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "gpu-plugin-nvidia"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
