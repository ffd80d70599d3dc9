"""Fixtures with NVIDIA's real driver libraries and with podman. If they are missing, the test is skipped with a sentence."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needed import cannot, found
from tests.real import archive
from tests.real.podman import SPECS, Podman, find


@pytest.fixture(scope="session")
def nvidia() -> Path:
    """The directory of the unpacked packages (see `archive`)."""
    return found(archive.unpacked)


@pytest.fixture(scope="session")
def podman(nvidia: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Podman with a small Debian image in which ldconfig did not run."""
    del nvidia
    if os.geteuid() != 0:
        cannot("containers with device nodes need root")
    found(find)
    made = not SPECS.exists()
    SPECS.mkdir(exist_ok=True)
    running = Podman(tmp_path_factory.mktemp("podman"), found(archive.debian_system))
    yield running
    running.close()
    if made:
        SPECS.rmdir()
