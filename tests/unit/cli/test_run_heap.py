"""All threads of the daemon share a heap, unless the environment sets MALLOC_ARENA_MAX."""

import subprocess
import sys

import pytest

THREADS = """
import os, re, threading
from gpu_plugin.cli.run import keep_small
keep_small(os.environ)
begun, end = threading.Barrier(5), threading.Event()
def work():
    held = [bytearray(2_000 + at) for at in range(50)]
    begun.wait()
    end.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
begun.wait()
import ctypes
libc = ctypes.CDLL(None)
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fdopen.restype = ctypes.c_void_p
libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
libc.fflush.argtypes = [ctypes.c_void_p]
stream = libc.fdopen(1, b"w")
libc.malloc_info(0, stream)
libc.fflush(stream)
end.set()
"""


@pytest.mark.parametrize(("said", "one"), [({}, True), ({"MALLOC_ARENA_MAX": "8"}, False)])
def test_threads_share_one_heap_unless_the_environment_says_otherwise(said, one):
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, check=True, env=said, text=True)
    assert (done.stdout.count("<heap nr=") == 1) is one
