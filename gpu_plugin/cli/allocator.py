"""The C library's allocator, set for a daemon that lives long and holds little."""

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3), as glibc's malloc.h numbers them: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX."""

_LARGE = 300_000
"""Bytes from which on a block is given back to the system when it is freed. More than what asyncio reads into (256 KiB), which
would otherwise be mapped anew for each request."""

_SLACK = 1024 * 1024
"""Bytes at the end of the heap that are kept: less than that is not worth a system call for each request."""


def keep_small(environ: Mapping[str, str]) -> None:
    """Has threads share one heap, and large blocks given back: 3 MiB less with 8 GPUs, whose threads would have a heap each.

    Only one thread at a time runs Python, so nothing waits for the shared heap. Left alone where the environment says how the
    allocator is to behave (mallopt(3)), and where the C library has none of this.
    """
    if "GLIBC_TUNABLES" in environ or any(name.startswith("MALLOC_") for name in environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _SLACK)):
            mallopt(parameter, value)
