"""Reads the table of Xids that ships with the package."""

from functools import cache
from pathlib import Path

import msgspec

import gpu_plugin.health
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.health.xid_table import XidTable, xid_table

SHIPPED = Path(gpu_plugin.health.__file__).with_name("xids.json")
"""Made of `xids.yaml`, which people read, by `make tables`."""


@cache
def shipped_table(path: Path = SHIPPED) -> XidTable:
    """The table of the package, read once.

    Raises:
        ConfigError: the file is not there or is no such table, with the place in it: the package is broken.
    """
    try:
        return xid_table(msgspec.json.decode(path.read_bytes()))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: the table of Xids cannot be read: {reason}; reinstall the package") from None
