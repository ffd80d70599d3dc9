"""A new daemon takes the node over from the serving daemon, on the real kubelet. Each daemon is killed at each step."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.to_thread
import pytest

from gpu_plugin.runtime import control
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.profile import load
from tests.unit.daemon.test_process import running
from tests.unit.daemon.test_takeover import FAULTY, Held
from tests.unit.waiting import until

from .conftest import PLUGIN
from .harness.cluster import Cluster
from .harness.layout import DEVICE_PLUGINS, Layout
from .harness.plugin import GPUS, SIMULATED_NODE, Plugin
from .harness.process import PieceError
from .harness.wait import NotYet, expect, wait_until

STEPS = ("waiting: another daemon", "the other daemon has handed over", "registered with the kubelet")
"""Lines of the new daemon's log, in this order."""


class NewPlugin(Plugin):
    """A second daemon on the node, with the state directory of the first."""

    name: ClassVar[str] = "gpu-plugin-new"

    def reaches(self, step: str) -> None:
        """Wait until the log has a line."""
        deadline = time.monotonic() + 20
        while step not in self.log_since(0):
            assert time.monotonic() < deadline, self.log_tail()
            time.sleep(0.002)


@pytest.fixture
def new(cluster: Cluster) -> Iterator[NewPlugin]:
    made = NewPlugin(Layout(), Path(PLUGIN))
    yield made
    made.kill()


def serves(cluster: Cluster, plugin: Plugin) -> None:
    """Wait until this daemon has the node."""

    def has_it() -> None:
        try:
            status = plugin.status()
        except PieceError as error:
            raise NotYet(str(error)) from None
        expect(holds=status["daemon"]["pid"] == plugin.pid and not status["waiting"], seen=status["daemon"])

    wait_until(has_it, f"{plugin.name} has the node", within=30)
    cluster.wait_allocatable(GPUS)


@pytest.mark.parametrize("step", STEPS)
def test_the_former_daemon_serves_on_if_the_new_daemon_is_killed(cluster: Cluster, new: NewPlugin, step: str) -> None:
    tenant = cluster.pods.run("tenant", gpus=1)
    new.start(wait=False)
    new.reaches(step)
    new.kill()
    serves(cluster, cluster.plugin)
    cluster.pods.run("after", gpus=GPUS - 1)
    assert cluster.pods.get("tenant").container_id == tenant.container_id


@pytest.mark.parametrize("step", STEPS)
def test_the_new_daemon_serves_if_the_former_daemon_is_killed(cluster: Cluster, new: NewPlugin, step: str) -> None:
    tenant = cluster.pods.run("tenant", gpus=1)
    new.start(wait=False)
    new.reaches(step)
    cluster.plugin.kill()
    serves(cluster, new)
    cluster.pods.run("after", gpus=GPUS - 1)
    assert cluster.pods.get("tenant").container_id == tenant.container_id


def test_faults_before_a_takeover_and_after_it_reach_pods(cluster: Cluster, new: NewPlugin) -> None:
    cluster.plugin.fault(1, "--xid=79")
    cluster.wait_allocatable(GPUS - 1)
    new.start(wait=False)
    new.reaches(STEPS[-1])
    new.fault(2, "--xid=79")
    cluster.wait_allocatable(GPUS - 2)
    new.stop()
    cluster.wait_allocatable(GPUS - 2)  # the former daemon has waited for its end
    cluster.plugin.heal(2)


def test_a_fault_during_a_takeover_reaches_pods_and_the_new_daemon(cluster: Cluster, tmp_path: Path) -> None:
    """Both daemons run in this process, where they share one simulated node and the test can hold the new daemon."""
    cluster.plugin.stop()
    cluster.wait_allocatable(0)
    anyio.run(fault_during_a_takeover, cluster, tmp_path)


async def fault_during_a_takeover(cluster: Cluster, state_dir: Path) -> None:
    node = SimulatedNode(load(SIMULATED_NODE))
    driver = Held(node)
    flags = {"state_dir": str(state_dir), "pod_resources_socket": str(cluster.layout.pod_resources)}
    beside = anyio.to_thread.run_sync
    async with running(DEVICE_PLUGINS, node, **flags) as (_, _, status):
        await beside(cluster.wait_allocatable, GPUS)
        async with running(DEVICE_PLUGINS, node, driver=driver, **flags):
            await beside(driver.asked.wait, 30)
            node.raise_xid(FAULTY, 48)  # the new daemon has no event set yet
            await beside(cluster.wait_allocatable, GPUS - 1)
            await beside(partial(cluster.pods.run, "during", gpus=1))
            driver.free.set()
            await until(lambda: bool(status))  # the former daemon has ended
            await beside(partial(cluster.pods.run, "after", gpus=GPUS - 2))
            await beside(cluster.wait_allocatable, GPUS - 1)
            reply = await beside(partial(control.request, state_dir, "status"))
            assert [signal["name"] for signal in reply["gpus"][FAULTY]["signals"]] == ["xid"]
