"""Reads the table of Xids that ships with the package."""

from functools import cache
from pathlib import Path

import gpu_plugin.health
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.yaml_problem import yaml_problem
from gpu_plugin.health.xid_table import XidTable, xid_table

SHIPPED = Path(gpu_plugin.health.__file__).with_name("xids.yaml")


@cache
def shipped_table() -> XidTable:
    """The table of the package, read once.

    Raises:
        ConfigError: the file is not there or is no such table: the package is broken, and must be installed anew.
    """
    return read_table(SHIPPED)


def read_table(path: Path) -> XidTable:
    """The table in a file. Raises ConfigError for one that cannot be read, with the file and the place in it."""
    import yaml  # noqa: PLC0415 - 9 ms and 1 MiB

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 2 ms, not 18
    try:
        return xid_table(yaml.load(path.read_bytes(), loader))  # noqa: S506 - both are safe loaders
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = yaml_problem(error) if isinstance(error, yaml.YAMLError) else " ".join(str(error).split())
        raise ConfigError(f"{path}: the table of Xids cannot be read: {reason}; reinstall the package") from None
