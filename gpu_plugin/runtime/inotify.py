"""The door to asyncinotify, whose import has no program run for us.

It looks for the C library with `ctypes.util.find_library`, which runs ldconfig, and compilers where there is none. The library is
in this process already, where asyncinotify looks for it next.
"""

import ctypes.util

_find = ctypes.util.find_library


def _nothing(name: str) -> str | None:  # noqa: ARG001
    """In place of `find_library` while asyncinotify is imported."""
    return None


ctypes.util.find_library = _nothing
try:
    from asyncinotify import Event, Inotify, Mask, Watch
finally:
    ctypes.util.find_library = _find

__all__ = ["Event", "Inotify", "Mask", "Watch"]
