"""The gpu-plugin command. At its end it writes how many modules of some packages it imported.

Usage: python -m bench.imported FILE PACKAGE,PACKAGE... COMMAND...
"""

import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from gpu_plugin import cli


def count(packages: Collection[str], modules: Iterable[str]) -> int:
    """Return how many of `modules` are in `packages`."""
    return sum(name.partition(".")[0] in packages for name in modules)


if __name__ == "__main__":
    file, named, *command = sys.argv[1:]
    status = cli.main(command)
    Path(file).write_text(str(count(named.split(","), list(sys.modules))))
    sys.exit(status)
