"""Prometheus and its promtool: on this machine, or of Debian's package, unpacked into the cache of the cluster tests."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.harness import binaries

PACKAGE = "prometheus"


@dataclass(frozen=True)
class Prometheus:
    """Where both programs are."""

    server: Path
    tool: Path


def find() -> Prometheus:
    """Both programs. Raises MissingError where they are neither on the search path nor in the cache."""
    unpacked = _directory() / "usr" / "bin"
    path = os.pathsep.join((*binaries.SYSTEM_PATH, str(unpacked)))
    server, tool = (shutil.which(name, path=path) for name in ("prometheus", "promtool"))
    if server is None or tool is None:
        raise binaries.MissingError("not on this machine: prometheus, promtool")
    return Prometheus(Path(server), Path(tool))


def install(say: Callable[[str], None]) -> Prometheus:
    """The same; the package is unpacked where they are missing, and nothing is installed. Raises MissingError."""
    with binaries.locked_cache() as cache:
        try:
            return find()
        except binaries.MissingError:
            say("fetching Debian's package prometheus: some 30 MB, once")
        with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as place:
            unpacked = Path(place) / "unpacked"
            _run(["apt-get", "download", PACKAGE], place)
            (package,) = Path(place).glob("*.deb")
            _run(["dpkg", "-x", package.name, str(unpacked)], place)
            shutil.rmtree(_directory(), ignore_errors=True)
            unpacked.rename(_directory())
    return find()


def _run(command: list[str], place: str) -> None:
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise binaries.MissingError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise binaries.MissingError(f"{' '.join(command)}: {done.stderr.strip()}")


def _directory() -> Path:
    return binaries.cache_directory() / "prometheus-debian"
