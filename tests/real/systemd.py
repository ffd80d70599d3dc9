"""systemd's own checker of units."""

import shutil
from collections.abc import Callable

from tests.cluster.harness import binaries


def find() -> str:
    """Return the path of systemd-analyze. Raises MissingError."""
    found = shutil.which("systemd-analyze")
    if found is None:
        raise binaries.MissingError("not on this machine: systemd-analyze")
    return found


def install(say: Callable[[str], None]) -> str:
    """Install systemd-analyze if it is missing, and return its path. Raises MissingError."""
    if shutil.which("systemd-analyze") is None:
        say("installing systemd")
        binaries.install_packages([("systemd",), ("libseccomp2",)])
    return find()
