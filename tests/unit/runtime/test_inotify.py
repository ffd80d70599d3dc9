"""What the door to asyncinotify is for."""

import ctypes.util
import subprocess
import sys

from gpu_plugin.runtime import inotify

PROGRAM = """
import sys

RUN = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system"}
sys.addaudithook(lambda event, arguments: print(event, arguments) if event in RUN else None)
import gpu_plugin.daemon.process
import gpu_plugin.runtime.inotify

with gpu_plugin.runtime.inotify.Inotify() as watching:
    watching.add_watch("/", gpu_plugin.runtime.inotify.Mask.CREATE)
"""


def test_the_daemon_runs_no_program_while_it_is_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_whoever_looks_for_a_library_later_finds_it():
    assert "Inotify" in inotify.__all__
    assert ctypes.util.find_library("c")
