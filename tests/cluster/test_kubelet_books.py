"""When the real kubelet lists and stores the devices of its pods. The stand-in kubelet follows the same rules.

tests/unit/demo/stand_in_kubelet/test_checkpoint.py has the same tests for the stand-in, and a table of both.
"""

import base64
import json
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import pytest

from gpu_plugin.kubelet import checkpoint, messages, pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.socket import identity

from .harness.cluster import Cluster
from .harness.layout import DEVICE_PLUGINS, KUBELET_SOCKET
from .harness.plugin import GPUS, RESOURCE
from .harness.pods import PATH, Pod
from .harness.wait import expect, stays, wait_until
from .test_mig import AS_BUILT, MIDDLE, SIMULATED_NODE, VARIED


def listed(cluster: Cluster) -> frozenset[tuple[str, str]]:
    """Return the (resource, device id) pairs that pods hold according to PodResources. Raises CallError."""
    return anyio.run(partial(pod_resources.allocated, cluster.layout.pod_resources, 5.0))


def named(pod: Pod) -> set[str]:
    """Return the device ids of a pod in the checkpoint."""
    entries, _ = checkpoint.read(DEVICE_PLUGINS)
    return {identifier for (_, identifier), uids in entries.items() if pod.uid in uids}


def test_the_checkpoint_has_the_form_that_is_read(cluster: Cluster) -> None:
    pod = cluster.pods.run("holder", gpus=2)
    assert named(pod) == set(pod.device_health)
    content: dict[str, Any] = json.loads((DEVICE_PLUGINS / checkpoint.NAME).read_text())
    assert {"Data", "Checksum"} <= content.keys()
    assert len(content["Data"]["RegisteredDevices"][RESOURCE]) == GPUS
    (entry,) = [each for each in content["Data"]["PodDeviceEntries"] if each["PodUID"] == pod.uid]
    assert entry.keys() == {"PodUID", "ContainerName", "ResourceName", "DeviceIDs", "AllocResp"}
    answer = messages.decode(messages.ContainerAllocateResponse, base64.b64decode(entry["AllocResp"]))
    assert set(answer.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == set(pod.device_health)


def test_the_checkpoint_keeps_a_pod_that_has_ended_until_a_list_comes(cluster: Cluster) -> None:
    pod = cluster.pods.run("holder", gpus=1)
    held = named(pod)
    cluster.pods.delete("holder")
    assert (
        not {identifier for _, identifier in listed(cluster)} & held
    )  # the request makes the kubelet free the pod's devices
    stays(lambda: expect(holds=named(pod) == held, seen=named(pod)), "the file is as it was", seconds=3)
    cluster.plugin.fault(0, "--xid=79")
    wait_until(lambda: expect(holds=not named(pod), seen=named(pod)), "the list has the file written", within=20)


def test_an_admission_that_asks_for_devices_has_a_pod_that_ended_forgotten_and_the_file_written(
    cluster: Cluster,
) -> None:
    pod = cluster.pods.run("holder", gpus=1)
    held = named(pod)
    assert held
    cluster.pods.delete("holder")
    cluster.pods.run("without", gpus=0)
    stays(lambda: expect(holds=named(pod) == held, seen=named(pod)), "a pod without devices changes nothing", seconds=2)
    after = cluster.pods.run("next", gpus=1)
    assert named(after)
    assert not named(pod)


@pytest.mark.parametrize(
    "damage", ["", "{", '{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}, "Checksum": 1}']
)
def test_a_damaged_checkpoint_is_an_empty_one(cluster: Cluster, damage: str) -> None:
    pod = cluster.pods.run("holder", gpus=1)
    assert named(pod)
    cluster.kubelet.kill()
    (DEVICE_PLUGINS / checkpoint.NAME).write_text(damage)
    cluster.kubelet.start()
    cluster.wait_allocatable(GPUS)
    assert not named(pod)


def early_answer(cluster: Cluster) -> frozenset[tuple[str, str]] | None:
    """Restart the kubelet, and return the first answer of PodResources; None if kubelet.sock was there before the answer."""
    cluster.kubelet.kill()
    dead = identity(DEVICE_PLUGINS / KUBELET_SOCKET)
    cluster.kubelet.start(wait=False)

    def answered() -> frozenset[tuple[str, str]]:
        try:
            return listed(cluster)
        except CallError as error:
            expect(holds=False, seen=error)
            raise

    pods = wait_until(answered, "PodResources answers", within=30, every=0.005)
    return pods if identity(DEVICE_PLUGINS / KUBELET_SOCKET) in (dead, None) else None


def test_pod_resources_answers_before_the_device_manager_listens_and_knows_no_devices_then(cluster: Cluster) -> None:
    pod = cluster.pods.run("holder", gpus=1)
    assert any(
        early_answer(cluster) == frozenset() for _ in range(5)
    )  # on a busy machine the first answer may come late
    assert named(pod) == set(pod.device_health)
    cluster.kubelet.wait_ready()
    cluster.wait_allocatable(GPUS)


@pytest.fixture
def sliced(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with a daemon that serves a node with MIG under strategy mixed."""
    cluster.plugin.simulate = SIMULATED_NODE
    cluster.plugin.extra = ("--mig-strategy=mixed",)
    cluster.plugin.restart()
    cluster.wait_offers(AS_BUILT)
    yield cluster
    assert not cluster.kubelet.crashed


def test_a_kubelet_that_starts_anew_gives_no_gpu_away_of_which_a_pod_has_a_slice(sliced: Cluster) -> None:
    sliced.pods.run("holder", gpus=1, resource=MIDDLE)
    sliced.plugin.fault(VARIED, "--mig=none")
    offered = AS_BUILT[RESOURCE]
    wait_until(
        lambda: expect(holds=sliced.node_gpus() == (offered + 1, offered), seen=sliced.node_gpus()),
        "the GPU is listed and held back",
        within=20,
    )
    sliced.kubelet.kill()
    sliced.kubelet.start()
    sliced.wait_allocatable(offered)
    stays(
        lambda: expect(holds=sliced.node_gpus()[1] == offered, seen=sliced.node_gpus()), "it is held back", seconds=10
    )
    sliced.pods.delete("holder")
    sliced.wait_allocatable(offered + 1)


def run_init_holder(sliced: Cluster) -> Pod:
    """Start a pod whose plain init container got a slice, which PodResources never lists, and return the pod."""
    pod = sliced.pods.create("init", gpus=0)
    body: dict[str, Any] = {key: pod.content[key] for key in ("apiVersion", "kind", "spec")}
    sliced.pods.delete("init")
    container = body["spec"]["containers"][0]
    body["metadata"] = {"name": "init"}
    body["spec"] = {
        **{key: body["spec"][key] for key in ("restartPolicy", "terminationGracePeriodSeconds", "dnsPolicy")},
        "automountServiceAccountToken": False,
        "containers": [{key: container[key] for key in ("name", "image", "imagePullPolicy", "command")}],
        "initContainers": [
            {
                "name": "first",
                "image": container["image"],
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", "true"],
                "resources": {"limits": {MIDDLE: "1"}},
            }
        ],
    }
    sliced.api.create(PATH, body)
    holder = sliced.pods.wait_running("init")
    assert len(named(holder)) == 1
    assert not {identifier for _, identifier in listed(sliced)} & named(holder)
    return holder


def test_what_a_plain_init_container_had_comes_back_when_its_pod_has_ended(sliced: Cluster) -> None:
    """PodResources never lists the device, and the kubelet removes it from the checkpoint only when it receives a list."""
    run_init_holder(sliced)
    sliced.plugin.fault(VARIED, "--mig=none")
    offered = AS_BUILT[RESOURCE]
    wait_until(
        lambda: expect(holds=sliced.node_gpus() == (offered + 1, offered), seen=sliced.node_gpus()),
        "the GPU is listed and held back",
        within=20,
    )
    stays(
        lambda: expect(holds=sliced.node_gpus()[1] == offered, seen=sliced.node_gpus()), "it is held back", seconds=10
    )
    sliced.pods.delete("init")
    sliced.wait_allocatable(offered + 1, within=40)


def test_an_unchanged_list_has_the_checkpoint_written_and_changes_no_figure(sliced: Cluster) -> None:
    """While a device waits for the end of a pod, the plugin sends its list again, at most every ten seconds."""
    holder = run_init_holder(sliced)
    sliced.plugin.fault(VARIED, "--mig=none")
    offered = AS_BUILT[RESOURCE]
    figures = (offered + 1, offered)
    wait_until(
        lambda: expect(holds=sliced.node_gpus() == figures, seen=sliced.node_gpus()), "the GPU is held back", within=20
    )
    _, before = checkpoint.read(DEVICE_PLUGINS)

    def written_again() -> None:
        _, now = checkpoint.read(DEVICE_PLUGINS)
        expect(holds=now != before, seen=now)

    wait_until(written_again, "the checkpoint is written again", within=25)
    stays(lambda: expect(holds=sliced.node_gpus() == figures, seen=sliced.node_gpus()), "nothing else is", seconds=12)
    assert len(named(holder)) == 1


# Restarts as in the kubelet's own tests (test/e2e_node/device_plugin_test.go).


def test_a_container_and_then_the_kubelet_restart_and_the_pod_keeps_its_gpus(cluster: Cluster) -> None:
    before = cluster.pods.run("kept", gpus=2, restart="Always")
    cluster.pods.signal(before, signal.SIGTERM)

    def restarted() -> Pod:
        pod = cluster.pods.get("kept")
        expect(holds=pod.running and pod.restarts == 1, seen=pod)
        return pod

    again = wait_until(restarted, "the container runs again", within=30)
    cluster.kubelet.restart()
    cluster.wait_allocatable(GPUS)
    after = cluster.pods.get("kept")
    assert (after.container_id, after.restarts) == (again.container_id, 1)
    assert set(after.device_health) == set(before.device_health)
    rest = cluster.pods.run("rest", gpus=GPUS - 2)
    assert not set(rest.device_health) & set(before.device_health)


def test_a_pod_that_has_succeeded_is_left_alone_when_the_kubelet_restarts_without_the_plugin(cluster: Cluster) -> None:
    cluster.pods.create("done", gpus=1, shell="true")

    def phase(expected: str) -> None:
        pod = cluster.pods.get("done")
        expect(holds=pod.phase == expected, seen=pod)

    wait_until(partial(phase, "Succeeded"), "the pod has succeeded", within=30)
    cluster.plugin.stop()
    cluster.kubelet.restart()
    stays(partial(phase, "Succeeded"), "the pod has succeeded and stays so", seconds=5)
    cluster.plugin.start()
    cluster.wait_allocatable(GPUS)


def test_what_a_pod_had_that_is_deleted_while_the_kubelet_is_away_is_free_after(cluster: Cluster) -> None:
    cluster.pods.run("gone", gpus=GPUS)
    cluster.kubelet.stop()
    cluster.api.delete(f"{PATH}/gone", grace=0)
    cluster.kubelet.start()
    cluster.wait_allocatable(GPUS)
    # The kubelet admits the pods of its first list before it frees devices (kubelet.go, syncLoopIteration: AddSource).
    cluster.pods.run("without", gpus=0)
    cluster.pods.run("next", gpus=GPUS)


def test_after_a_reboot_a_pod_fails_that_comes_before_the_plugin_has_registered(cluster: Cluster) -> None:
    pod = cluster.pods.run("early", gpus=1, restart="Always")
    cluster.plugin.stop()
    cluster.kubelet.stop()
    cluster.pods.signal(pod, signal.SIGKILL)  # containers do not outlive a reboot
    cluster.kubelet.start()

    def failed() -> None:
        now = cluster.pods.get("early")
        expect(holds=now.phase == "Failed", seen=now)

    wait_until(failed, "the pod fails", within=30)
    words = "no healthy devices present; cannot allocate unhealthy devices " + RESOURCE
    assert words in cluster.pods.get("early").reason
    assert cluster.node_gpus()[1] == 0
    cluster.plugin.start()
    cluster.wait_allocatable(GPUS)
    cluster.pods.run("late", gpus=GPUS)
