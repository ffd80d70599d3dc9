"""Save and restore the kernel settings that a kubelet changes at each start."""

import json
from pathlib import Path

from .layout import Layout

_SYSCTL = Path("/proc/sys")
_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def save(layout: Layout) -> None:
    """Save the settings to a file, unless they were saved since the last `restore`."""
    if not layout.tunables.exists():
        values = {name: (_SYSCTL / name).read_text() for name in _SETTINGS if (_SYSCTL / name).exists()}
        layout.tunables.write_text(json.dumps(values))


def restore(layout: Layout) -> None:
    """Restore the saved settings, if there are any."""
    if layout.tunables.exists():
        for name, value in json.loads(layout.tunables.read_text()).items():
            if (_SYSCTL / name).read_text() != value:
                (_SYSCTL / name).write_text(value)
