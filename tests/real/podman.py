"""Containers of podman and runc, which get devices by CDI name as from a kubelet's runtime."""

import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.harness import binaries

IMAGE = "localhost/gpu-plugin-test:1"

# The directories in which podman reads specifications. In a new mount namespace, a test mounts another directory over the second.
SPECS = Path("/run/cdi")

_IN_NAMESPACE = 'mount --bind "$1" /run/cdi && shift && exec "$@"'


PACKAGES = {"podman": "podman", "runc": "runc", "unshare": "util-linux"}
"""Debian's package of each needed program."""


def find() -> None:
    """Check that podman and the other programs are on this machine. Raises MissingError."""
    if missing := _missing():
        raise binaries.MissingError(f"not on this machine: {', '.join(missing)}")


def install(say: Callable[[str], None]) -> None:
    """Install the missing programs. Raises MissingError."""
    if missing := _missing():
        say(f"installing {', '.join(missing)}")
        binaries.install_packages([(PACKAGES[name],) for name in missing])
    find()


def _missing() -> list[str]:
    return [name for name in PACKAGES if binaries.program(name) is None]


class Podman:
    """An image of a small Debian system, and its containers. All files are below `directory`."""

    def __init__(self, directory: Path, system: Path) -> None:
        self._directory = directory
        runc = binaries.program("runc")
        self._command = ["podman", f"--root={directory / 'storage'}", f"--runroot={directory / 'run'}"]
        self._command += ["--storage-driver=vfs", "--cgroup-manager=cgroupfs", f"--runtime={runc}", "--log-level=error"]
        archive = directory / "system.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(system, arcname=".")
        self._podman("import", str(archive), IMAGE)

    def python(self, specs: Path, names: Sequence[str], code: str) -> str:
        """Run a Python program in a container with these CDI devices of the specifications in `specs`. Return its output."""
        return self.run(specs, names, "python3", "-c", code)

    def run(self, specs: Path, names: Sequence[str], *command: str) -> str:
        """Run a program in a container and return its output. Raises AssertionError with its error output if it fails."""
        devices = [f"--device={name}" for name in names]
        limits = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
        return self._podman("run", "--rm", *limits, *devices, IMAGE, *command, specs=specs)

    def close(self) -> None:
        """Remove the image."""
        self._podman("rmi", "--all", "--force")

    def _podman(self, *arguments: str, specs: Path | None = None) -> str:
        command = [*self._command, *arguments]
        if specs is not None:
            command = ["unshare", "--mount", "sh", "-c", _IN_NAMESPACE, "sh", str(specs), *command]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self._directory)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout
