"""Faults during a takeover: two daemons over one simulated node, in this process, so that a test can hold the new daemon."""

import threading

import anyio
import pytest

from demo.stand_in_kubelet import StandInKubelet
from demo.stand_in_kubelet.admission import PodAdmission
from demo.stand_in_kubelet.journal import EventKind
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.runtime import control
from gpu_plugin.runtime.control import ControlError
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.state.memory import Memory
from tests.unit.waiting import until

from .test_process import GPU, healthy, running

FAULTY = 3


@pytest.fixture(params=["1.36", "1.37"])
async def kubelet(request, directory):
    async with StandInKubelet(directory, generation=request.param) as started:
        yield started
    # A kubelet of 1.36 closes the connection of the new daemon when the stream of the former daemon ends.
    assert request.param == "1.36" or not started.violations


class Held(SimulatedDriver):
    """A driver that does not open before `free` is set. It fails to open if `broken` is set then."""

    def __init__(self, node):
        super().__init__(node)
        self.asked, self.free = threading.Event(), threading.Event()
        self.broken = False

    def open(self):
        self.asked.set()
        assert self.free.wait(30)
        if self.broken:
            raise NvmlError(Return.DRIVER_NOT_LOADED, "nvmlInit_v2")
        super().open()


@pytest.fixture
def answers(monkeypatch):
    """Writes of the hardware to the state directory hang while this event is clear."""
    real, made = Memory.write_hardware, threading.Event()
    made.set()

    def write(*arguments):
        made.wait(30)
        return real(*arguments)

    monkeypatch.setattr(Memory, "write_hardware", write)
    return made


def asked(directory, verb, **fields):
    return anyio.to_thread.run_sync(lambda: control.request(directory / "state", verb, **fields))


async def serves(directory, kubelet, count):
    """Return once the kubelet has `count` healthy devices from a daemon that accepts commands."""
    await kubelet.wait_for(lambda: GPU in kubelet.resources and kubelet.resources[GPU].allocatable == count, 20)
    with anyio.fail_after(20):
        while True:
            try:
                if not (await asked(directory, "status"))["waiting"]:
                    return
            except ControlError:
                await anyio.sleep(0.01)


async def test_a_fault_during_a_takeover_reaches_the_kubelet_and_the_new_daemon(kubelet, directory, node):
    async with running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        driver = Held(node)
        async with running(directory, node, driver=driver) as (_, _, _):
            await until(driver.asked.is_set)
            node.raise_xid(FAULTY, 48)  # the new daemon has no event set yet
            await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
            driver.free.set()
            await until(lambda: bool(status))  # the former daemon has ended
            await kubelet.wait_for(healthy(kubelet, 7), 20)
            gpu = (await asked(directory, "status"))["gpus"][FAULTY]
            assert [each["name"] for each in gpu["signals"]] == ["xid"]
            await until(lambda: not (directory / "state" / "handover.json").exists())


async def test_a_former_daemon_keeps_the_faults_of_a_takeover_that_failed(kubelet, directory, node):
    async with running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        driver = Held(node)
        driver.broken = True
        async with running(directory, node, driver=driver, fail_on_init_error="true") as (_, _, ended):
            await until(driver.asked.is_set)
            node.raise_xid(FAULTY, 48)
            await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
            driver.free.set()
            await until(lambda: ended == [1])
        await serves(directory, kubelet, 7)
        assert status == []
        await asked(directory, "cordon", gpu=0)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 6)
    async with running(directory, node) as (_, _, _):
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 6, 20)


async def test_a_fault_during_a_takeover_outlives_a_former_daemon_that_is_stopped(kubelet, directory, node):
    stop = anyio.Event()

    async def former():
        async with running(directory, node):
            await stop.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(former)
        await kubelet.wait_for(healthy(kubelet, 8))
        driver = Held(node)
        async with running(directory, node, driver=driver) as (_, _, _):
            await until(driver.asked.is_set)
            node.raise_xid(FAULTY, 48)
            await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
            stop.set()
            await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
            driver.free.set()
            await serves(directory, kubelet, 7)
            await until(lambda: not (directory / "state" / "handover.json").exists())


async def test_no_order_is_lost_with_a_new_daemon_that_ends_before_it_serves(kubelet, directory, node):
    async with running(directory, node) as (_, _, _):
        await kubelet.wait_for(healthy(kubelet, 8))
        await asked(directory, "cordon", gpu=0)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
        driver = Held(node)
        driver.broken = True
        async with running(directory, node, driver=driver, fail_on_init_error="true") as (_, _, ended):
            await until(driver.asked.is_set)
            refused = []

            async def uncordon():
                try:
                    await asked(directory, "uncordon", gpu=0)
                except ControlError as error:
                    refused.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(uncordon)
                await anyio.sleep(0.3)
                driver.free.set()
            await until(lambda: ended == [1])
        await serves(directory, kubelet, 7 if refused else 8)


async def test_evidence_that_could_not_be_written_before_a_takeover_reaches_the_new_daemon(
    kubelet, directory, node, monkeypatch
):
    real, full = Memory.write_evidence, [True]
    monkeypatch.setattr(Memory, "write_evidence", lambda self, *evidence: not full and real(self, *evidence))
    monkeypatch.setattr(Memory, "write_hardware", lambda *_: False)
    async with running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        node.raise_xid(FAULTY, 48)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
        driver = Held(node)
        async with running(directory, node, driver=driver) as (_, _, _):
            await until(driver.asked.is_set)
            driver.free.set()
            await until((directory / "state" / "handover.json").exists)
            await serves(directory, kubelet, 7)
            await until(lambda: bool(status))
            await anyio.sleep(0.5)
            assert (directory / "state" / "handover.json").exists()  # nothing else has the fault
            full.clear()
            await until(lambda: not (directory / "state" / "handover.json").exists())


async def test_a_claim_just_after_a_registration_does_not_end_the_daemon(kubelet, directory, node, monkeypatch):
    real, may = Memory.handed_over, threading.Event()
    began = set()

    def slow(self):
        if self in began:
            may.wait(30)
        began.add(self)
        return real(self)

    monkeypatch.setattr(Memory, "handed_over", slow)  # the second call of a daemon is after its registration
    async with running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        async with running(directory, node) as (_, _, _):
            await until((directory / "state" / "takeover.lock").exists)
            await anyio.sleep(1)
            assert len(began) == 1  # the new daemon reads no state while the former one still reads
            may.set()
            await until(lambda: bool(status))
            await serves(directory, kubelet, 8)
    kinds = [event.kind for event in kubelet.events if event.kind in (EventKind.REGISTERED, EventKind.STREAM_ENDED)]
    assert kinds[:2] == [EventKind.REGISTERED, EventKind.REGISTERED]


async def test_a_daemon_with_healthy_gpus_that_no_kubelet_has_ends_for_a_new_daemon_at_once(directory, node):
    async with running(directory, node) as (_, _, status):
        with anyio.fail_after(20):
            while not await healthy_devices(directory):
                await anyio.sleep(0.01)
        async with running(directory, node) as (_, _, _):
            await until(lambda: bool(status))


async def healthy_devices(directory):
    """The number of healthy devices that the daemon would send to a kubelet; 0 before it takes commands."""
    try:
        resources = (await asked(directory, "status"))["resources"]
    except ControlError:
        return 0
    return sum(each["healthy"] for each in resources.values())


async def test_a_state_directory_that_hangs_at_a_claim_costs_no_registration(kubelet, directory, node, answers):
    async with running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        answers.clear()
        await asked(directory, "cordon", gpu=0)
        async with running(directory, node) as (_, _, _):
            await anyio.sleep(3)
            assert kubelet.registrations[GPU].accepted == 1
            assert (await asked(directory, "status"))["waiting"] == ""
            answers.set()
            await until(lambda: bool(status))
            await serves(directory, kubelet, 7)


async def test_a_daemon_with_a_write_that_hangs_does_not_outlive_its_end(kubelet, directory, node, answers):
    """The write may return after the new daemon has written."""
    async with running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        answers.clear()
        for gpu in range(8):
            node.lose(gpu)
        await kubelet.wait_for(healthy(kubelet, 0))
        async with running(directory, node) as (_, _, _):
            await until(lambda: status == [1])
            answers.set()


async def test_a_call_that_the_kubelet_was_about_to_make_is_answered_by_the_former_daemon(directory, node, monkeypatch):
    """The kubelet chooses the plugin, asks it for its preference, and then has it allocate."""
    real = PodAdmission._ask_preferred

    async def slow(self, *arguments):
        preferred = await real(self, *arguments)
        await anyio.sleep(0.15)
        return preferred

    async with StandInKubelet(directory, generation="1.37") as kubelet, running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        monkeypatch.setattr(PodAdmission, "_ask_preferred", slow)
        async with running(directory, node) as (_, _, _), anyio.create_task_group() as pods:
            number = 0
            while not status:
                pods.start_soon(admit_and_release, kubelet, f"pod-{number}")
                number += 1
                await anyio.sleep(0.03)


async def test_the_kubelet_gets_no_list_of_the_former_daemon_after_the_lists_of_the_new_one(directory, node):
    async with StandInKubelet(directory, generation="1.37") as kubelet, running(directory, node) as (_, _, status):
        await kubelet.wait_for(healthy(kubelet, 8))
        async with running(directory, node):
            await until(lambda: kubelet.registrations[GPU].accepted == 2)
            for gpu in (0, FAULTY):
                await cordoned(directory, gpu)
            await kubelet.wait_for(healthy(kubelet, 6))
            assert not status  # the former daemon still answers calls
            node.raise_xid(FAULTY, 48)  # this changes only the list of the former daemon
            lists = kubelet.resources[GPU].lists
            while not status:
                assert kubelet.resources[GPU].allocatable == 6
                await anyio.sleep(0.01)
            await kubelet.wait_for(lambda: kubelet.resources[GPU].lists > lists)  # in place of a list that came late
            assert kubelet.resources[GPU].allocatable == 6


async def cordoned(directory, gpu):
    """Cordon a GPU through the new daemon, as soon as it takes commands."""
    with anyio.fail_after(20):
        while True:
            try:
                return await asked(directory, "cordon", gpu=gpu)
            except ControlError:
                await anyio.sleep(0.005)


async def admit_and_release(kubelet, name):
    await kubelet.admit(name, {GPU: 1})
    kubelet.release(name)
