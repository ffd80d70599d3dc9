"""What needs NVIDIA's real driver libraries, skipped with one sentence where they cannot be had."""

import os
import sys
from pathlib import Path

import pytest

from tests.real import archive

REQUIRED = os.environ.get("E2E") == "required"


@pytest.fixture(scope="session")
def nvidia() -> Path:
    """The unpacked packages (see `archive`)."""
    try:
        return archive.unpacked()
    except archive.NoArchiveError as error:
        reason = f"no test with NVIDIA's real libraries: {error}"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def root(nvidia: Path) -> None:
    """Needs root: device nodes are made and containers run."""
    del nvidia
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        reason = "no test with NVIDIA's real libraries in containers: it needs Linux and root"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
