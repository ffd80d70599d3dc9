"""Device nodes for tests of trees that are a node's root: links out of such a tree are not followed."""

import os
import stat
from pathlib import Path

import pytest

NULL = os.makedev(1, 3)  # the number of /dev/null


def device(path: Path, number: int = NULL, mode: int = 0o666) -> Path:
    """A character device at this path, made with the directories on the way. Skips the test if only root can make it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mknod(path, stat.S_IFCHR, number)
    except PermissionError:
        pytest.skip("only root can make device nodes")
    path.chmod(mode)
    return path
