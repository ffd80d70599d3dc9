"""The signals that steer a process."""

import logging
import os
import signal

import anyio
import pytest

from gpu_plugin.runtime.signals import STOP, restore_default_actions, told_to_stop


@pytest.mark.parametrize("number", STOP)
async def test_a_signal_to_stop_is_told_by_name_and_sighup_is_none(number):
    reloads, stopped = [], []

    async def steer():
        stopped.append(await told_to_stop(lambda: reloads.append(1)))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(steer)
            await anyio.wait_all_tasks_blocked()
            for count in (1, 2):
                os.kill(os.getpid(), signal.SIGHUP)
                while len(reloads) < count:
                    await anyio.lowlevel.checkpoint()
            assert not stopped
            os.kill(os.getpid(), number)
    assert stopped == [number.name]


@pytest.mark.parametrize("number", [*STOP, signal.SIGHUP])
async def test_a_further_signal_does_not_keep_a_process_from_ending_in_order(number, caplog):
    caplog.set_level(logging.INFO)
    reloads = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(told_to_stop, lambda: reloads.append(1))
        await anyio.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) not in {signal.SIG_DFL, signal.default_int_handler}
    os.kill(os.getpid(), number)
    with anyio.fail_after(5):
        while f"{number.name}: stopping already" not in caplog.text:
            await anyio.lowlevel.checkpoint()
    assert not reloads


async def test_sighup_is_left_alone_where_nothing_is_read_again():
    before = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(told_to_stop)
        await anyio.wait_all_tasks_blocked()
        assert signal.getsignal(signal.SIGHUP) == before[0]
        assert signal.getsignal(signal.SIGTERM) != before[1]
        tasks.cancel_scope.cancel()
    assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == before


async def test_what_comes_last_can_be_ended_by_any_of_them():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(told_to_stop)
        await anyio.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGTERM)
    restore_default_actions()
    assert [signal.getsignal(number) for number in STOP] == [signal.SIG_DFL, signal.default_int_handler, signal.SIG_DFL]
