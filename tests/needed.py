"""Files and programs that a test needs beyond the checkout.

`python -m tests.tools` puts them there. Without them the test is skipped with one sentence.
"""

import os
from collections.abc import Callable
from typing import NoReturn, TypeVar

import pytest

from tests.cluster.harness.binaries import MissingError

Found = TypeVar("Found")

REQUIRED = os.environ.get("E2E") == "required"
"""Whether a test that cannot run is a failure."""


def found(find: Callable[[], Found]) -> Found:
    """The result of `find`. Skips the test, or fails it if E2E=required, on MissingError."""
    try:
        return find()
    except MissingError as missing:
        cannot(f"{missing}; E2E_INSTALL=1 make e2e installs it")


def cannot(why: str) -> NoReturn:
    """Skips the test, or fails it if E2E=required."""
    if REQUIRED:
        pytest.fail(why)
    pytest.skip(why)
