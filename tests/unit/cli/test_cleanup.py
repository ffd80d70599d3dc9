"""What `gpu-plugin cleanup --stay` ends by; the rest is tested with real daemons."""

import signal
import threading

import pytest

from gpu_plugin import cli
from gpu_plugin.runtime.signals import STOP


@pytest.mark.parametrize("number", STOP, ids=lambda number: number.name)
def test_one_that_stays_ends_in_order_by_each_signal_that_ends_a_daemon(number):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        signal.pthread_kill(threading.get_ident(), number)  # waits until it is asked for
        assert cli.main(["cleanup", "--stay"]) == 0
        assert not signal.sigpending()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
