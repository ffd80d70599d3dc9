"""Containers by podman and runc, given devices by their CDI names as a kubelet's runtime would."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

IMAGE = "localhost/gpu-plugin-test:1"

# Where podman looks for specifications; in a mount namespace of its own another directory takes the place of the second.
SPECS = Path("/run/cdi")

_IN_NAMESPACE = 'mount --bind "$1" /run/cdi && shift && exec "$@"'


class NoPodmanError(Exception):
    """Containers cannot be run here; the text says why."""


def install() -> None:
    """Has podman and runc on this machine, as root and through apt where E2E_INSTALL=1. Raises NoPodmanError."""
    missing = [name for name in ("podman", "runc", "unshare") if program(name) is None]
    if missing and os.environ.get("E2E_INSTALL") == "1" and shutil.which("apt-get"):
        packages = [{"unshare": "util-linux"}.get(name, name) for name in missing]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", *command], env=environment, capture_output=True, check=False, timeout=600)
        missing = [name for name in missing if program(name) is None]
    if missing:
        raise NoPodmanError(f"not on this machine: {', '.join(missing)}; E2E_INSTALL=1 installs them")


def program(name: str) -> str | None:
    """Where a program is, also one for administrators alone."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")


class Podman:
    """One image of a small Debian system, and containers of it; all of it below `directory`."""

    def __init__(self, directory: Path, system: Path) -> None:
        self._directory = directory
        runc = program("runc")
        self._command = ["podman", f"--root={directory / 'storage'}", f"--runroot={directory / 'run'}"]
        self._command += ["--storage-driver=vfs", "--cgroup-manager=cgroupfs", f"--runtime={runc}", "--log-level=error"]
        archive = directory / "system.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(system, arcname=".")
        self._podman("import", str(archive), IMAGE)

    def python(self, specs: Path, names: Sequence[str], code: str) -> str:
        """What a Python program prints in a container that has these CDI devices, of specifications in `specs`."""
        return self.run(specs, names, "python3", "-c", code)

    def run(self, specs: Path, names: Sequence[str], *command: str) -> str:
        """What a program prints there. Raises AssertionError with what it complained of where it fails."""
        devices = [f"--device={name}" for name in names]
        limits = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
        return self._podman("run", "--rm", *limits, *devices, IMAGE, *command, specs=specs)

    def close(self) -> None:
        """Takes the image away."""
        self._podman("rmi", "--all", "--force")

    def _podman(self, *arguments: str, specs: Path | None = None) -> str:
        command = [*self._command, *arguments]
        if specs is not None:
            command = ["unshare", "--mount", "sh", "-c", _IN_NAMESPACE, "sh", str(specs), *command]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self._directory)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout
