"""A GPU fails while a pod holds it: the node's allocatable GPUs, and the health in the pod's status."""

import pytest

from .harness.cluster import Cluster
from .harness.plugin import GPUS
from .harness.wait import expect, stays, wait_until

FALLEN_OFF_THE_BUS = "--xid=79"
DOUBLE_BIT_ECC = "--xid=48"
APPLICATION_XIDS = (13, 31, 43)


def wait_health(cluster: Cluster, name: str, expected: dict[str, str]) -> None:
    def shown() -> None:
        health = cluster.pods.get(name).device_health
        expect(holds=health == expected, seen=health)

    wait_until(shown, f"the status of pod {name} has {expected}", within=20)


def offers_at_most(cluster: Cluster, count: int) -> None:
    _, allocatable = cluster.node_gpus()
    expect(holds=allocatable <= count, seen=f"allocatable {allocatable}")


def test_a_fault_shows_on_the_node_and_on_the_one_device_it_hit(cluster: Cluster, numbers: dict[str, int]) -> None:
    hit, spared = cluster.pods.run("hit", gpus=2), cluster.pods.run("spared", gpus=1)
    broken, sound = hit.device_health
    cluster.plugin.fault(numbers[broken], FALLEN_OFF_THE_BUS)

    cluster.wait_allocatable(GPUS - 1)
    wait_health(cluster, "hit", {broken: "Unhealthy", sound: "Healthy"})
    assert cluster.node_gpus() == (GPUS, GPUS - 1)
    assert set(cluster.pods.get("spared").device_health.values()) == {"Healthy"}
    assert cluster.pods.get("hit").container_id == hit.container_id
    assert cluster.pods.get("spared").container_id == spared.container_id


def test_new_pods_get_sound_gpus_only(cluster: Cluster, numbers: dict[str, int]) -> None:
    cluster.plugin.fault(3, FALLEN_OFF_THE_BUS)
    cluster.wait_allocatable(GPUS - 1)
    pod = cluster.pods.run("rest", gpus=GPUS - 1)
    assert set(pod.device_health) == {device_id for device_id, number in numbers.items() if number != 3}


def test_a_fault_outlives_the_plugin(cluster: Cluster) -> None:
    cluster.plugin.fault(5, FALLEN_OFF_THE_BUS)
    cluster.wait_allocatable(GPUS - 1)

    for end in (cluster.plugin.stop, cluster.plugin.kill):
        end()
        cluster.plugin.start()
        stays(lambda: offers_at_most(cluster, GPUS - 1), "the faulty GPU is not offered", seconds=5)
        cluster.wait_allocatable(GPUS - 1)


def test_an_application_error_changes_nothing(cluster: Cluster, numbers: dict[str, int]) -> None:
    pod = cluster.pods.run("buggy", gpus=1)
    (device_id,) = pod.device_health
    log_begins = cluster.plugin.log_size()
    for xid in APPLICATION_XIDS:
        cluster.plugin.fault(numbers[device_id], f"--xid={xid}")

    def all_seen() -> None:
        log = cluster.plugin.log_since(log_begins)
        unseen = [xid for xid in APPLICATION_XIDS if f"Xid {xid} " not in log]
        expect(holds=not unseen, seen=f"nothing of {unseen} in the daemon's log")

    def unchanged() -> None:
        gpus, health = cluster.node_gpus(), cluster.pods.get("buggy").device_health
        expect(holds=gpus == (GPUS, GPUS) and health == {device_id: "Healthy"}, seen=f"node {gpus}, pod {health}")

    wait_until(all_seen, "the daemon has seen every Xid", within=10)
    stays(unchanged, "the GPU is healthy", seconds=4)


def test_a_fatal_xid_under_a_pod_outlives_a_kill_of_the_plugin_and_ends_with_a_reset(
    cluster: Cluster, numbers: dict[str, int]
) -> None:
    (device_id,) = cluster.pods.run("hit", gpus=1).device_health
    number = numbers[device_id]
    cluster.plugin.fault(number, DOUBLE_BIT_ECC)
    cluster.wait_allocatable(GPUS - 1)
    wait_health(cluster, "hit", {device_id: "Unhealthy"})
    cluster.plugin.kill()
    cluster.plugin.start()
    stays(lambda: offers_at_most(cluster, GPUS - 1), "the GPU is not offered", seconds=4)
    cluster.wait_allocatable(GPUS - 1)
    wait_health(cluster, "hit", {device_id: "Unhealthy"})
    explained = cluster.plugin.explain(number)
    assert (explained["uuid"], explained["healthy"], explained["verdict"]) == (device_id, False, "FATAL")
    assert any("48" in signal["detail"] for signal in explained["signals"])

    cluster.plugin.fault(number, "--reset")
    cluster.wait_allocatable(GPUS)
    wait_health(cluster, "hit", {device_id: "Healthy"})
    explained = cluster.plugin.explain(number)  # may contain errors of applications in the last ten minutes
    assert (explained["healthy"], [each for each in explained["signals"] if each["verdict"] != "APP"]) == (True, [])
    cluster.pods.delete("hit")
    assert device_id in cluster.pods.run("next", gpus=GPUS).device_health


def test_a_cordoned_gpu_gets_no_new_pod_and_costs_the_running_one_nothing(
    cluster: Cluster, numbers: dict[str, int]
) -> None:
    pod = cluster.pods.run("running", gpus=1)
    (device_id,) = pod.device_health
    cluster.plugin.operate("cordon", numbers[device_id])
    try:
        cluster.wait_allocatable(GPUS - 1)
        assert cluster.pods.get("running").container_id == pod.container_id
        cluster.pods.delete("running")
        rest = cluster.pods.run("rest", gpus=GPUS - 1)
        assert device_id not in rest.device_health
    finally:
        cluster.plugin.operate("uncordon", numbers[device_id])
    cluster.wait_allocatable(GPUS)


@pytest.mark.parametrize("fault", [FALLEN_OFF_THE_BUS, "--lost", "--temperature=120"])
def test_a_repaired_gpu_is_offered_again(cluster: Cluster, numbers: dict[str, int], fault: str) -> None:
    pod = cluster.pods.run("hit", gpus=1)
    (device_id,) = pod.device_health
    cluster.plugin.fault(numbers[device_id], fault)
    cluster.wait_allocatable(GPUS - 1)
    wait_health(cluster, "hit", {device_id: "Unhealthy"})

    cluster.plugin.heal(numbers[device_id])
    cluster.wait_allocatable(GPUS)
    wait_health(cluster, "hit", {device_id: "Healthy"})


def test_a_driver_that_hangs_on_one_gpu_holds_up_no_other(cluster: Cluster, numbers: dict[str, int]) -> None:
    cluster.plugin.extra = ("--nvml-timeout=2s",)
    cluster.plugin.restart()
    cluster.wait_allocatable(GPUS)
    cluster.plugin.fault(3, "--hang=60")
    pod = cluster.pods.run("beside", gpus=GPUS - 4)
    cluster.wait_allocatable(GPUS - 1)
    rest = cluster.pods.run("later", gpus=3)
    assert 3 not in {numbers[device_id] for device_id in rest.device_health}
    assert cluster.pods.get("beside").container_id == pod.container_id


def test_a_lost_gpu_stays_on_the_node_over_a_restart_of_the_plugin(cluster: Cluster) -> None:
    cluster.plugin.fault(2, "--lost")
    cluster.wait_allocatable(GPUS - 1)
    cluster.plugin.restart()
    cluster.wait_allocatable(GPUS - 1)
    assert cluster.node_gpus() == (GPUS, GPUS - 1)
