"""The program `cdi_judge`, which uses the CDI library of container runtimes. It is built once for each state of its sources."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from tests.cluster.harness import binaries

SOURCE = Path(__file__).parent / "cdi_judge"


def find() -> Path:
    """Return the path of the program. Raises MissingError if it was not built yet."""
    program = _directory() / "cdi-judge"
    if not program.is_file():
        raise binaries.MissingError("not on this machine: the library of container runtimes for CDI")
    return program


def install(say: Callable[[str], None]) -> Path:
    """Build the program if it is missing, and return its path. Raises MissingError if that fails."""
    with binaries.locked_cache():
        if not _directory().is_dir():
            say("building the library of container runtimes for CDI")
            binaries.go_build(_directory(), SOURCE, "cdi-judge")
    return find()


def _directory() -> Path:
    sources = b"".join((SOURCE / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
    return binaries.cache_directory() / f"cdi-judge-{hashlib.sha256(sources).hexdigest()[:12]}"
