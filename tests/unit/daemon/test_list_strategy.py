"""The choice of a device list strategy for `auto`, with disks that fail or hang."""

import errno
import threading

import anyio
import msgspec
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.containers.strategy_choice import ContainerdEvidence, KubeletEvidence, NodeEvidence
from gpu_plugin.daemon.list_strategy import ListStrategy, evidence_for, log_strategy
from tests.unit.containers.node_files.node import NodeTree

pytestmark = pytest.mark.anyio

NAMED = resolve({"device_list_strategy": "cdi-annotations,envvar"}, {})
LEFT = resolve({"device_list_strategy": "auto"}, {})
GOOD = NodeEvidence(
    kubelet=KubeletEvidence("1.31.2"),
    sockets=("/run/containerd/containerd.sock",),
    containerd={"containerd": ContainerdEvidence("/etc/containerd/config.toml", 3)},
)


def unlooked(_settings):
    raise AssertionError("nothing is to be looked at")


async def test_where_strategies_are_named_nothing_is_looked_at(caplog):
    strategy = ListStrategy(unlooked)
    threads = threading.active_count()
    assert await strategy.settled(NAMED) is NAMED
    assert threading.active_count() == threads
    with caplog.at_level("INFO"):
        log_strategy(NAMED)
    assert not caplog.records


async def test_the_node_s_files_are_looked_at_on_a_thread_and_the_choice_is_said(caplog):
    looked = []

    def look(settings):
        looked.append((threading.current_thread() is threading.main_thread(), settings))
        return GOOD

    settled = await ListStrategy(look).settled(LEFT)
    assert looked == [(False, LEFT)]
    assert settled.device_list_strategy == ("cdi-cri",)
    assert settled.device_list_strategy_reason.startswith("auto: the kubelet's package is of version 1.31.2, and ")
    assert msgspec.structs.replace(settled, device_list_strategy=("auto",), device_list_strategy_reason="") == LEFT
    with caplog.at_level("INFO"):
        log_strategy(settled)
    assert "device list strategy: cdi-cri (auto: the kubelet's package" in caplog.text


async def test_each_reading_of_the_configuration_looks_again():
    found = [GOOD, NodeEvidence(trouble="gone")]
    strategy = ListStrategy(lambda _: found.pop(0))
    assert [(await strategy.settled(LEFT)).device_list_strategy for _ in range(2)] == [("cdi-cri",), ("envvar",)]


async def test_specs_are_looked_for_where_they_are_written():
    settled = await ListStrategy(lambda _: GOOD).settled(msgspec.structs.replace(LEFT, cdi_dir="/opt/cdi"))
    assert settled.device_list_strategy == ("envvar",)


async def test_a_disk_that_hangs_means_envvar_and_holds_one_thread_at_most():
    release, calls = threading.Event(), []

    def hang(_settings):
        calls.append(1)
        release.wait(30)
        return GOOD

    strategy = ListStrategy(hang, patience=0.05)
    try:
        with anyio.fail_after(5):
            first = await strategy.settled(LEFT)
            again = await strategy.settled(LEFT)
    finally:
        release.set()
    assert first.device_list_strategy == again.device_list_strategy == ("envvar",)
    assert first.device_list_strategy_reason == "auto: the node's files could not be read within 0.05 s"
    assert again.device_list_strategy_reason == "auto: an earlier read of the node's files still hangs"
    assert len(calls) == 1


async def test_what_was_chosen_before_is_used_on_while_the_disk_hangs_or_a_look_fails(caplog):
    release, looks = threading.Event(), []

    def look(_settings):
        looks.append(1)
        if len(looks) == 2:
            raise RuntimeError("broken")
        if len(looks) == 3:
            release.wait(30)
        return GOOD if len(looks) < 4 else NodeEvidence(trouble="gone")

    strategy = ListStrategy(look, patience=0.25)
    try:
        settled = [await strategy.settled(LEFT) for _ in range(4)]
    finally:
        release.set()
    assert settled[0].device_list_strategy == ("cdi-cri",)
    assert settled == settled[:1] * 4
    for why in (
        "RuntimeError('broken')",
        "could not be read within 0.25 s",
        "an earlier read of the node's files still",
    ):
        assert why in caplog.text
    for thread in threading.enumerate():
        if thread.name == "node-files":
            thread.join(5)
    await anyio.wait_all_tasks_blocked()
    assert (await strategy.settled(LEFT)).device_list_strategy == ("envvar",)


@pytest.mark.parametrize(
    "error", [AssertionError("odd"), TimeoutError(errno.ETIMEDOUT, "Connection timed out", "/etc")]
)
async def test_a_look_that_fails_means_envvar(error, caplog):
    def fail(_settings):
        raise error

    settled = await ListStrategy(fail).settled(LEFT)
    assert settled.device_list_strategy == ("envvar",)
    assert settled.device_list_strategy_reason == f"auto: the read of the node's files failed: {error!r}"
    assert "Traceback" in caplog.text


def test_the_node_is_seen_where_it_is_mounted(tmp_path, monkeypatch):
    node = NodeTree(tmp_path / "driver-root")
    kubelet = tmp_path / "kubelet"
    node.put(f"{kubelet}/allocated_pods_state", "{}")
    asked = msgspec.structs.replace(LEFT, device_plugin_dir=f"{kubelet}/device-plugins/")
    mounted = msgspec.structs.replace(asked, driver_root_ctr_path=str(node.root))
    assert evidence_for(mounted).kubelet.state_file == f"{kubelet}/allocated_pods_state"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    absent = msgspec.structs.replace(asked, driver_root_ctr_path=str(tmp_path / "absent"))
    assert evidence_for(absent).trouble.startswith(
        "this process is in a container, and the node's root directory is not mounted there: mount it at"
    )
