"""Work in a child process: its result, its end, and its hanging. Each in a fresh interpreter without other threads."""

import os
import subprocess
import sys
import threading

import pytest

from gpu_plugin.doctor.child_process import in_child

BEGIN = """
import os, signal, time
from gpu_plugin.doctor.child_process import ChildError, in_child

def nothing_is_left():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return "nothing left"
    return "a process is left"

def failed(work, limit):
    try:
        return repr(in_child(work, limit))
    except (ChildError, ZeroDivisionError) as error:
        return str(error)

def never():
    while True:
        signal.pause()
"""


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], check=True, capture_output=True, text=True, timeout=50)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "print(int(in_child(lambda: b'%d' % os.getpid(), 10)) != os.getpid(), nothing_is_left())",
            "True nothing left",
        ),
        ("content = os.urandom(300_000); print(in_child(lambda: content, 10) == content)", "True"),
        ("print(failed(never, 0.2), nothing_is_left())", "no answer within 0.2 s: the process"),
        ("print(failed(never, 0.2), nothing_is_left())", "nothing left"),
        ("print(failed(lambda: os.kill(os.getpid(), signal.SIGKILL), 10))", "ended without an answer"),
        ("print(failed(lambda: 1 / 0, 10), nothing_is_left())", "division by zero nothing left"),
        ("print(failed(lambda: bytes(2**22), 10))", "longer than 2097152 bytes"),
    ],
    ids=["another process", "long", "hangs", "hangs and is ended", "killed", "raised", "too long"],
)
def test_the_result_of_another_process(code, words):
    assert words in said(code)


def test_what_is_stuck_is_not_waited_for():
    """A stopped process, in place of a process that the kernel holds: it has answered, and does not end."""
    stuck = """
def stop_once_told():
    leave = os._exit
    os._exit = lambda status: (os.kill(os.getpid(), signal.SIGSTOP), leave(status))
    return b"%d" % os.getpid()

began = time.monotonic()
child = int(in_child(stop_once_told, 10))
print(time.monotonic() - began < 5)
os.kill(child, signal.SIGKILL)
"""
    assert said(stuck) == "True"


def test_beside_other_threads_nothing_is_forked():
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    me = threading.get_ident()
    try:
        assert in_child(lambda: b"%d %d" % (os.getpid(), threading.get_ident()), 10.0) == b"%d %d" % (os.getpid(), me)
    finally:
        over.set()
        other.join()
