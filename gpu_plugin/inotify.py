"""The door to asyncinotify, whose import has no program run for us.

It looks for the C library with `ctypes.util.find_library`, which runs ldconfig, and compilers where there is none. The library is
in this process already, where asyncinotify looks for it next.
"""

import ctypes.util
from collections.abc import Callable

_find: Callable[[str], str | None] = ctypes.util.find_library
ctypes.util.find_library = lambda name: None  # noqa: ARG005
try:
    from asyncinotify import Event, Inotify, Mask
finally:
    ctypes.util.find_library = _find

__all__ = ["Event", "Inotify", "Mask"]
