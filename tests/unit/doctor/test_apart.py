"""Work in a process of its own: its result, its end, and what holds it."""

import os
import signal
import threading
import time

import pytest

from gpu_plugin.doctor.apart import ApartError, apart

pytestmark = pytest.mark.skipif("threading.active_count() > 1", reason="threads of other tests: nothing is forked then")


def test_the_result_is_another_processes(capsys):
    assert int(apart(lambda: b"%d" % os.getpid(), 10.0)) != os.getpid()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # and nothing of it is left


def test_a_long_result_arrives_whole():
    content = os.urandom(300_000)
    assert apart(lambda: content, 10.0) == content


def test_what_gives_no_answer_is_left():
    def never() -> bytes:
        while True:
            signal.pause()

    began = time.monotonic()
    with pytest.raises(ApartError, match=r"no answer within 0\.2 s"):
        apart(never, 0.2)
    assert time.monotonic() - began < 5
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: 1 / 0], ids=["killed", "raised"])
def test_what_ends_without_an_answer(end):
    with pytest.raises(ApartError, match="without an answer"):
        apart(end, 10.0)


def test_too_much_is_not_taken():
    with pytest.raises(ApartError, match="longer than"):
        apart(lambda: bytes(2**21), 10.0)


def test_beside_other_threads_nothing_is_forked():
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        assert int(apart(lambda: b"%d" % os.getpid(), 10.0)) == os.getpid()
    finally:
        over.set()
        other.join()
