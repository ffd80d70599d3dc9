"""The signals that steer a process."""

import logging
import os
import signal

import anyio
import pytest

from gpu_plugin.runtime.signals import STOP, Signals


async def until(met):
    with anyio.fail_after(5):
        while not met():
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("number", STOP)
async def test_a_signal_stops_and_sighup_reloads(number):
    signals, calls = Signals(), []
    signals.on_stop(lambda: calls.append("stop"))
    signals.on_reload(lambda: calls.append("reload"))
    for count in (1, 2):
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda count=count: len(calls) == count)
    assert not signals.stopped_by
    os.kill(os.getpid(), number)
    await until(lambda: signals.stopped_by)
    assert calls == ["reload", "reload", "stop"]
    assert signals.stopped_by == number.name


async def test_signals_that_come_before_the_callbacks_are_passed_on_once():
    signals, calls = Signals(), []
    for number in (signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), number)
    await until(lambda: signals.stopped_by)
    for _ in range(2):
        signals.on_reload(lambda: calls.append("reload"))
    for _ in range(2):
        signals.on_stop(lambda: calls.append("stop"))  # each phase of the start ends
    assert calls == ["reload", "stop", "stop"]


@pytest.mark.parametrize("number", [*STOP, signal.SIGHUP])
async def test_a_further_signal_does_not_keep_a_process_from_ending_in_order(number, caplog):
    caplog.set_level(logging.INFO)
    signals, calls = Signals(), []
    signals.on_stop(lambda: calls.append("stop"))
    signals.on_reload(lambda: calls.append("reload"))
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: calls)
    assert signal.getsignal(number) not in {signal.SIG_DFL, signal.default_int_handler}
    os.kill(os.getpid(), number)
    await until(lambda: f"{number.name}: stopping already" in caplog.text)
    assert calls == ["stop"]


async def test_sighup_is_left_alone_where_nothing_is_read_again():
    before = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    Signals(reloads=False)
    assert signal.getsignal(signal.SIGHUP) == before[0]
    assert signal.getsignal(signal.SIGTERM) != before[1]
