"""A new daemon takes the node over from the daemon that runs, while pods are created all the time."""

import fcntl
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import anyio.to_thread
import pytest

from demo.stand_in_kubelet import AdmissionError, StandInKubelet
from gpu_plugin.runtime.control import ControlError, request
from gpu_plugin.state.node_lock import CLAIM
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.node.test_listener import flags, get, told

GAP = 0.5
"""Seconds in which a kubelet up to 1.36 may have no device while the former daemon ends, on a busy machine."""


STEPS = ("waiting: another daemon", "the other daemon has handed over", "registered with the kubelet")
"""Lines of the new daemon's log."""


@pytest.fixture(params=["1.36", "1.37"])
async def kubelet(request, directory):
    async with StandInKubelet(directory, generation=request.param) as running:
        yield running
    running.check()


@pytest.fixture
def generation(request):
    return request.node.callspec.params["kubelet"]


@pytest.fixture
def new(directory):
    made = DaemonProcess(directory)
    made.log = directory / "new.log"
    yield made
    made.kill()


class Pods:
    """Pods that were created one after the other, and for how long they were refused."""

    def __init__(self) -> None:
        self.started = 0
        self.refusals: list[tuple[float, str]] = []

    @property
    def longest_gap(self) -> float:
        """Seconds from the first to the last refusal in a row."""
        return max((at for at, _ in self.refusals), default=0.0) - min((at for at, _ in self.refusals), default=0.0)


async def serves(daemon: DaemonProcess) -> None:
    """Returns once commands reach this daemon, which has the node then."""
    assert daemon.process is not None
    with anyio.fail_after(20):
        while True:
            with suppress(ControlError):
                status = await anyio.to_thread.run_sync(partial(request, daemon.state, "status"))
                if status["daemon"]["pid"] == daemon.process.pid and not status["waiting"]:
                    return
            await anyio.sleep(0.02)


@asynccontextmanager
async def created_all_the_time(kubelet: StandInKubelet) -> AsyncIterator[Pods]:
    pods = Pods()

    async def create() -> None:
        while True:
            name = f"pod-{pods.started + len(pods.refusals)}"
            try:
                await kubelet.admit(name, {GPU: 1})
                pods.started += 1
                kubelet.release(name)
            except AdmissionError as error:
                pods.refusals.append((anyio.current_time(), str(error)))
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(create)
        yield pods
        tasks.cancel_scope.cancel()


async def test_every_pod_starts_while_a_new_daemon_takes_over(kubelet, generation, daemon, new):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    async with created_all_the_time(kubelet) as pods:
        new.start()
        await daemon.said("waiting: another daemon")  # it has ended its servers
        await kubelet.wait_for(healthy(kubelet, 8))
        before = pods.started
        assert (await daemon.stop())[0] == 0
        await serves(new)
        while pods.started < before + 10:
            await anyio.sleep(0.01)
    assert pods.started > 20
    if generation == "1.36":
        # This kubelet closes the connection of the new daemon when the stream of the former daemon ends, with the calls on it.
        kubelet.violations.clear()
        assert pods.longest_gap <= GAP, pods.refusals
    else:
        assert not pods.refusals


async def test_a_fault_before_the_takeover_and_a_fault_after_it_reach_the_kubelet(kubelet, daemon, new):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(0, xid=48)
    await kubelet.wait_for(healthy(kubelet, 7))
    new.start()
    await daemon.said("waiting: another daemon")
    new.fault(1, xid=48)
    await kubelet.wait_for(healthy(kubelet, 6))


async def test_a_new_daemon_that_cannot_serve_leaves_the_node_to_the_former_one(kubelet, daemon, new):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    new.profile = ""
    new.start()
    assert await new.exit(20) == 1
    await serves(daemon)
    daemon.fault(0, xid=48)
    await kubelet.wait_for(healthy(kubelet, 7))
    assert kubelet.registrations[GPU].accepted == 1


async def test_a_new_daemon_that_ends_while_it_registers_has_the_former_one_register_again(kubelet, daemon, new):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    kubelet.delay_register(5, answer_only=True)
    new.start()
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].total == 2)
    new.kill()
    kubelet.delay_register(0)
    await serves(daemon)
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].total == 3)
    await kubelet.wait_for(healthy(kubelet, 8))
    assert (await kubelet.admit("pod", {GPU: 8})).allocations[0].ids


async def test_a_daemon_without_a_healthy_device_ends_for_a_new_daemon_at_once(kubelet, daemon, new):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    for gpu in range(8):
        daemon.fault(gpu, error=999)
    await kubelet.wait_for(healthy(kubelet, 0))
    new.start()
    await serves(new)
    await daemon.said("waiting: another daemon")
    for gpu in range(8):
        new.fault(gpu, heal=True)
    await kubelet.wait_for(healthy(kubelet, 8), 30)


async def test_a_daemon_on_a_node_without_a_gpu_ends_for_a_new_daemon_at_once(directory, new):
    profile = directory / "none.json"
    profile.write_text(json.dumps({"count": 0, "gpu": {"name": "NVIDIA X"}}))
    former = DaemonProcess(directory, profile=str(profile))
    new.profile = str(profile)
    try:
        former.start("--fail-on-init-error=false")
        await former.said("finds no GPU on this node")
        new.start("--fail-on-init-error=false")
        await serves(new)
        await former.said("waiting: another daemon")
    finally:
        former.kill()


async def test_a_new_daemon_without_a_healthy_device_leaves_the_node_to_the_former_one(kubelet, daemon, new, directory):
    daemon.start("--device-list-strategy", "envvar")
    await kubelet.wait_for(healthy(kubelet, 8))
    new.specs = directory / "file" / "cdi"
    new.specs.parent.write_text("")
    new.start("--device-list-strategy", "cdi-cri")
    await new.said("the other daemon has handed over")
    await new.said(str(new.specs))  # no device is healthy without its specification
    async with created_all_the_time(kubelet) as pods:
        while pods.started + len(pods.refusals) < 100:  # time in which the new daemon could register
            await anyio.sleep(0.01)
        assert kubelet.registrations[GPU].accepted == 1
        new.kill()
        await serves(daemon)
        before = pods.started
        while pods.started < before + 10:
            await anyio.sleep(0.01)
    assert not pods.refusals
    assert kubelet.registrations[GPU].accepted == 1


@pytest.mark.parametrize(
    "profile",
    [{"count": 8, "gpu": {"name": "NVIDIA X"}, "init_error": 9}, {"count": 0, "gpu": {"name": "NVIDIA X"}}],
    ids=["dead driver", "no GPU"],
)
async def test_a_pod_is_not_ready_before_it_serves_what_the_former_one_serves(
    kubelet, generation, daemon, new, directory, port, profile
):
    if generation == "1.36":
        pytest.skip("the kubelet has no part in it")
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    file = directory / "broken.json"
    file.write_text(json.dumps(profile))
    new.profile = str(file)
    new.start(*flags(port, "--fail-on-init-error=false"))
    await new.said("the other daemon has handed over")
    await told(port, "startupz", 200, "[+]driver ok")
    # Kubernetes ends the former pod as soon as the new pod is ready.
    status, _, body = await get(port, "readyz")
    assert status == 503
    assert "[-]node failed" in body
    new.kill()
    await serves(daemon)


async def test_a_pod_is_ready_once_it_has_taken_over(kubelet, daemon, new, port):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    new.start(*flags(port))
    await told(port, "readyz", 200)
    await daemon.said("waiting: another daemon")


async def test_a_new_daemon_that_is_stopped_leaves_the_specifications_to_the_former_one(kubelet, daemon, new):
    flags = ("--device-list-strategy", "cdi-cri", "--cdi-remove-on-exit")
    daemon.start(*flags)
    await kubelet.wait_for(healthy(kubelet, 8))
    written = {path.name: path.stat().st_ino for path in daemon.specs.iterdir()}
    assert written
    kubelet.delay_register(2)
    new.start(*flags)
    await new.said("8 devices: 8 Healthy")
    new.signal(signal.SIGTERM)
    await new.exit(10)
    kubelet.delay_register(0)
    await serves(daemon)
    await kubelet.wait_for(healthy(kubelet, 8))
    assert {path.name: path.stat().st_ino for path in daemon.specs.iterdir()} == written


async def test_the_next_daemon_may_claim_a_node_whose_driver_is_dead(directory, new):
    profile = directory / "dead.json"
    profile.write_text(json.dumps({"count": 2, "gpu": {"name": "NVIDIA X"}, "init_error": 9}))
    former = DaemonProcess(directory, profile=str(profile))
    new.profile = str(profile)
    try:
        former.start("--fail-on-init-error=false")
        await former.said("the NVIDIA driver cannot be used")
        new.start("--fail-on-init-error=false")
        await new.said("waiting: another daemon")
        await former.stop()
        await new.said("the NVIDIA driver cannot be used")
        with (new.state / CLAIM).open("rb") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        former.kill()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_end_of_the_new_daemon_at_any_step_leaves_the_node_to_the_former_one(
    kubelet, daemon, new, step, number
):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    new.start()
    await new.said(step)
    new.signal(number)
    await new.exit(10)
    await serves(daemon)
    await kubelet.wait_for(healthy(kubelet, 8))
    assert (await kubelet.admit("pod", {GPU: 8})).allocations[0].ids


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_end_of_the_former_daemon_at_any_step_leaves_the_node_to_the_new_one(
    kubelet, daemon, new, step, number
):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    new.start()
    await new.said(step)
    daemon.signal(number)
    await daemon.exit(10)
    await new.said("registered with the kubelet")
    await kubelet.wait_for(healthy(kubelet, 8))
    assert (await kubelet.admit("pod", {GPU: 8})).allocations[0].ids


async def test_a_third_daemon_takes_over_from_the_second_with_the_first_in_standby(kubelet, daemon, new, directory):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    new.start()
    await daemon.said("waiting: another daemon")
    third = DaemonProcess(directory)
    third.log = directory / "third.log"
    try:
        third.start()
        await new.said("waiting: another daemon uses the state directory", 20)
        await third.said("registered with the kubelet", 20)
        await kubelet.wait_for(healthy(kubelet, 8))
        assert (await kubelet.admit("pod", {GPU: 8})).allocations[0].ids
    finally:
        third.kill()
