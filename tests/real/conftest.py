"""What needs NVIDIA's real driver libraries, skipped with one sentence where they cannot be had."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.real import archive
from tests.real.podman import SPECS, NoPodmanError, Podman, install

REQUIRED = os.environ.get("E2E") == "required"


def _cannot(why: str) -> NoReturn:
    reason = f"no test with NVIDIA's real libraries: {why}"
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def nvidia() -> Path:
    """The unpacked packages (see `archive`)."""
    try:
        return archive.unpacked()
    except archive.NoArchiveError as error:
        _cannot(str(error))


@pytest.fixture(scope="session")
def podman(nvidia: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Podman with a small Debian image in which ldconfig never ran."""
    del nvidia
    if os.geteuid() != 0:
        _cannot("containers with device nodes need root")
    try:
        install()
    except NoPodmanError as error:
        _cannot(str(error))
    made = not SPECS.exists()
    SPECS.mkdir(exist_ok=True)
    running = Podman(tmp_path_factory.mktemp("podman"), archive.debian_system())
    yield running
    running.close()
    if made:
        SPECS.rmdir()
