"""A new daemon takes the node over from the daemon that serves, on the real kubelet, and either is killed at each step."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from .conftest import PLUGIN
from .harness.cluster import Cluster
from .harness.layout import Layout
from .harness.plugin import GPUS, Plugin
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
