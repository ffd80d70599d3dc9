"""Find, install and build the programs of the cluster and of the chart's tests.

Programs without a distribution package are built into `${XDG_CACHE_HOME:-~/.cache}/gpu-plugin-e2e`, with one directory for each
version and source. A directory appears there only after a complete build, so that only a machine's first run builds.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSIONS = ("1.37.2", "1.36.3")
"""Versions of Kubernetes that the cluster can run, newest first. Each has its Go module in `kubernetes/`."""
CONTAINERD_VERSION = "v2.4.2"
GO_OLDEST = (1, 21)  # the first version that downloads the newer toolchain that a module requires

KUBERNETES_SOURCE = Path(__file__).parent / "kubernetes"
KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
CONTAINERD_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
CONTAINERD_PACKAGES = "github.com/containerd/containerd/v2/cmd"

# Programs that check and install the chart, by their name here: the program, its Go package, and its version.
TOOLS = {
    "helm": ("helm", "helm.sh/helm/v4/cmd/helm", "v4.3.1"),
    "helm3": ("helm", "helm.sh/helm/v3/cmd/helm", "v3.22.0"),
    "kubeconform": ("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform", "v0.8.0"),
}

SYSTEM_PATH = (
    *os.environ.get("PATH", "").split(os.pathsep),
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
)
CNI_DIRECTORIES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
CNI_PLUGINS = ("bridge", "host-local")

# The Debian and Ubuntu packages that may contain a program, newer name first.
PACKAGES = {
    "etcd": ("etcd-server", "etcd"),
    "runc": ("runc",),
    "static busybox": ("busybox-static",),
    "ip": ("iproute2",),
    "openssl": ("openssl",),
    "socat": ("socat",),
    "kubectl": ("kubernetes-client", "kubectl"),
    "umount": ("mount",),
    "CNI plugins": ("containernetworking-plugins",),
}


class MissingError(Exception):
    """A program that the tests need is not on this machine or cannot be installed. The text has its name and the reason."""


@dataclass(frozen=True)
class Binaries:
    """The paths of the programs."""

    etcd: Path
    runc: Path
    busybox: Path
    cni: Path
    socat: Path
    kubectl: Path
    kubernetes_directory: Path
    containerd_directory: Path

    def kubernetes(self, program: str) -> str:
        return str(self.kubernetes_directory / program)

    def containerd(self, program: str) -> str:
        return str(self.containerd_directory / program)


def kubernetes_version() -> str:
    """Return the version that GPU_PLUGIN_KUBERNETES selects, by default the newest version.

    Raises:
        MissingError: the harness has no module for that version.
    """
    version = os.environ.get("GPU_PLUGIN_KUBERNETES") or KUBERNETES_VERSIONS[0]
    if version not in KUBERNETES_VERSIONS:
        known = ", ".join(KUBERNETES_VERSIONS)
        raise MissingError(f"GPU_PLUGIN_KUBERNETES={version}: the tests run on these versions of Kubernetes: {known}")
    return version


def cache_directory() -> Path:
    """Return the directory of the built programs and of the last run's logs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-plugin-e2e"


def find() -> Binaries:
    """Return the paths of all programs on this machine.

    Raises:
        MissingError: with the names of all missing programs.
    """
    missing = [*_missing_packaged()]
    missing += [
        directory.name for directory in (_kubernetes_directory(), _containerd_directory()) if not directory.is_dir()
    ]
    if missing:
        raise MissingError(f"not on this machine: {', '.join(missing)}")
    etcd, runc, busybox, socat, kubectl = map(_surely, ("etcd", "runc", "busybox", "socat", "kubectl"))
    cni = _cni()
    assert cni is not None
    return Binaries(etcd, runc, busybox, cni, socat, kubectl, _kubernetes_directory(), _containerd_directory())


def install(say: Callable[[str], None]) -> Binaries:
    """Install and build the programs that `find` does not find, as root, with apt and Go.

    Args:
        say: called with a text before each long step.

    Raises:
        MissingError: a program cannot be installed. The text has its name and the reason.
    """
    if missing := _missing_packaged():
        say(f"installing {', '.join(missing)}")
        install_packages([PACKAGES[name] for name in missing])
        if still := _missing_packaged():
            raise MissingError(f"{', '.join(still)}: still not there after installing packages")
    with locked_cache():
        if not (directory := _containerd_directory()).is_dir():
            say(f"building containerd {CONTAINERD_VERSION}: about 2 minutes, once")
            _build(directory, _build_containerd)
        if not (directory := _kubernetes_directory()).is_dir():
            say(f"building Kubernetes {kubernetes_version()}: about 7 minutes on 2 cores, once")
            _build(directory, _build_kubernetes)
    return find()


def find_tool(name: str) -> Path:
    """Return the path of a program of `TOOLS`, which need no cluster.

    Raises:
        MissingError: the program has not been built yet.
    """
    program = _tool_directory(name) / TOOLS[name][0]
    if not program.exists():
        raise MissingError(f"not on this machine: {program.name} {TOOLS[name][2]}")
    return program


def install_tool(name: str, say: Callable[[str], None]) -> Path:
    """Return the path of a program of `TOOLS`. If it is missing, call `say` with a text and build it.

    Raises:
        MissingError: the program cannot be built. The text has the reason.
    """
    program, package, version = TOOLS[name]
    directory = _tool_directory(name)
    with locked_cache():
        if not directory.is_dir():
            say(f"building {program} {version}: up to 3 minutes, once")
            _build(directory, lambda place: _go_install(place, f"{package}@{version}"))
    return directory / program


@contextlib.contextmanager
def locked_cache() -> Iterator[Path]:
    """Lock the cache directory and yield it, so that no other process builds in it. Removes abandoned builds."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        for abandoned in cache.glob("building-*"):
            shutil.rmtree(abandoned)
        yield cache


def go_build(directory: Path, source: Path, name: str) -> None:
    """Build the Go program of the module at `source` into `directory`, which does not exist. The caller locks the cache.

    Raises:
        MissingError: Go is not installed, or it failed.
    """
    _build(
        directory, lambda place: _go(_building("build", "-mod=readonly", "-o", str(place / name), "."), str(source), {})
    )


def npm_install(directory: Path, packages: Sequence[str]) -> None:
    """Install packages of npm's registry in `directory`, which does not exist. The caller locks the cache.

    Raises:
        MissingError: npm is not installed, or it failed.
    """

    def installed(place: Path) -> None:
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--save-exact", *packages]
        (place / "package.json").write_text("{}")
        try:
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise MissingError(f"npm: {error}") from error
        if done.returncode:
            raise MissingError(f"{' '.join(command)}: {done.stderr.strip()}")

    _build(directory, installed)


def module_source(module: str, version: str, into: Path) -> Path:
    """Download the source of a Go module into the directory `into`, which has no other use.

    Raises:
        MissingError: the module cannot be downloaded.
    """
    environment = {"GOMODCACHE": str(into), "GOFLAGS": "-modcacherw"}
    return Path(json.loads(_go(["mod", "download", "-json", f"{module}@{version}"], str(into), environment))["Dir"])


def _tool_directory(name: str) -> Path:
    program, _, version = TOOLS[name]
    return cache_directory() / f"{program}-{version}"


def _missing_packaged() -> list[str]:
    programs = (name for name in PACKAGES if name not in {"CNI plugins", "static busybox"})
    missing = [name for name in programs if program(name) is None]
    if (busybox := program("busybox")) is None or not _static(busybox):
        missing.append("static busybox")
    return missing + (["CNI plugins"] if _cni() is None else [])


def program(name: str) -> Path | None:
    """Return the path of a program. Searches the directories for administrators, too."""
    found = shutil.which(name, path=os.pathsep.join(SYSTEM_PATH))
    return Path(found) if found else None


def _surely(name: str) -> Path:
    found = program(name)
    assert found is not None, name
    return found


def _static(program: Path) -> bool:
    """Return True if a 64-bit ELF program needs no dynamic loader (it has no program header of type 3)."""
    content = program.read_bytes()
    (table,), (size, count) = struct.unpack_from("<Q", content, 32), struct.unpack_from("<HH", content, 54)
    return 3 not in {struct.unpack_from("<I", content, table + size * each)[0] for each in range(count)}


def _cni() -> Path | None:
    return next((path for path in CNI_DIRECTORIES if all((path / plugin).exists() for plugin in CNI_PLUGINS)), None)


def _kubernetes_directory() -> Path:
    source = hashlib.sha256()
    for path in _kubernetes_sources():
        source.update(path.read_bytes())
    return cache_directory() / f"kubernetes-v{kubernetes_version()}-{source.hexdigest()[:12]}"


def _kubernetes_sources() -> list[Path]:
    module = KUBERNETES_SOURCE / f"v{kubernetes_version()}"
    return [KUBERNETES_SOURCE / "main.go", module / "go.mod", module / "go.sum"]


def _containerd_directory() -> Path:
    return cache_directory() / f"containerd-{CONTAINERD_VERSION}"


def install_packages(alternatives: Iterable[tuple[str, ...]]) -> None:
    """Install Debian packages: of each tuple, the first package that apt knows.

    Raises:
        MissingError: apt is not installed, or it failed.
    """
    if shutil.which("apt-get") is None:
        names = ", ".join(names[0] for names in alternatives)
        raise MissingError(f"{names}: there is no apt-get on this machine; install them by hand")
    with locked_cache():  # apt-get update does not wait for another apt-get
        _apt(["apt-get", "update"])
        packages = [_available(names) for names in alternatives]
        # Wait for the lock: another apt may run on a machine that has just booted.
        _apt(["apt-get", "install", "--option=DPkg::Lock::Timeout=120", "--yes", "--no-install-recommends", *packages])


def _available(names: tuple[str, ...]) -> str:
    for name in names:
        shown = subprocess.run(["apt-cache", "show", "--no-all-versions", name], capture_output=True, check=False)
        if shown.returncode == 0 and shown.stdout:
            return name
    raise MissingError(f"apt knows no package {' or '.join(names)}")


def _apt(command: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise MissingError(
            f"{' '.join(command)}: exit status {done.returncode}:\n{_last_lines(done.stderr or done.stdout)}"
        )


def _build(directory: Path, build: Callable[[Path], object]) -> None:
    # Build in a temporary directory, and rename it at the end: an interrupted build does not look complete.
    place = Path(tempfile.mkdtemp(prefix="building-", dir=directory.parent))
    build(place)
    place.chmod(0o755)
    place.rename(directory)


def _build_kubernetes(place: Path) -> None:
    with tempfile.TemporaryDirectory() as source:
        for path in _kubernetes_sources():
            shutil.copy(path, source)
        major, minor, _ = kubernetes_version().split(".")
        version = {"gitVersion": f"v{kubernetes_version()}", "gitMajor": major, "gitMinor": minor}
        flags = " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in version.items())
        _go(_building("build", "-ldflags", f"-s -w {flags}", "-o", str(place / "kubernetes"), "."), source, {})
    for program in KUBERNETES_PROGRAMS:
        (place / program).symlink_to("kubernetes")


def _build_containerd(place: Path) -> None:
    packages = [f"{CONTAINERD_PACKAGES}/{program}@{CONTAINERD_VERSION}" for program in CONTAINERD_PROGRAMS]
    _go_install(place, *packages)


def _go_install(place: Path, *packages: str) -> None:
    _go(_building("install", "-ldflags", "-s -w", *packages), str(place), {"GOBIN": str(place)})


def _building(verb: str, *arguments: str) -> list[str]:
    # -p limits load and memory: one compiler for each core, with at most about 1 GiB each.
    # Without inlining (-l) a build takes a quarter less time.
    bounds = ("-p", str(os.cpu_count() or 1), "-gcflags=all=-l")
    return [verb, "-trimpath", "-buildvcs=false", *bounds, *arguments]


def _go(arguments: list[str], directory: str, environment: dict[str, str]) -> str:
    """Run Go and return its standard output. Raises MissingError if Go fails."""
    command = [_go_program(), *arguments]
    settings = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "auto", "GOWORK": "off"} | environment
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        building = subprocess.Popen(
            command, cwd=directory, env=os.environ | settings, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            status = building.wait()
        finally:
            # If the run is interrupted, also kill the compilers, which Go starts in its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(building.pid, signal.SIGKILL)
        output.seek(0)
        errors.seek(0)
        text = output.read()
        if status:
            raise MissingError(f"{' '.join(command)}: exit status {status}:\n{_last_lines(errors.read() or text)}")
        return text


def _go_program() -> str:
    needed = f"Go {GO_OLDEST[0]}.{GO_OLDEST[1]} or newer on PATH or in /usr/local/go"
    found = shutil.which("go", path=os.pathsep.join((*SYSTEM_PATH, "/usr/local/go/bin")))
    if found is None:
        raise MissingError(f"the build of the programs without a package needs {needed}; Go is not installed")
    reported = subprocess.run([found, "version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"go(\d+)\.(\d+)", reported)
    if version is None or (int(version[1]), int(version[2])) < GO_OLDEST:
        raise MissingError(
            f"the build of the programs without a package needs {needed}; {found} is {reported.strip() or 'unknown'}"
        )
    return found


def _last_lines(text: str, count: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
