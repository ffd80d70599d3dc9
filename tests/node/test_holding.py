"""Hardware that pods hold, over restarts of the kubelet and of the daemon, under the daemon as it runs."""

import random
import time

import anyio
import pytest

from demo.stand_in_kubelet import AdmissionError, Container
from tests.node.daemon import GPU, healthy, ids

SMALL = "nvidia.com/mig-1g.10gb"

pytestmark = pytest.mark.anyio


async def test_a_kubelet_that_knows_no_pods_yet_frees_nothing(kubelet, daemon):
    daemon.profile = "h100-mig-single"
    daemon.start("--mig-strategy", "mixed")
    await kubelet.wait_for(healthy(kubelet, 56, SMALL))
    held = (await kubelet.admit("pod", {SMALL: 1})).ids[0]
    for gpu in range(8):
        daemon.fault(gpu, mig="none")
    await kubelet.wait_for(healthy(kubelet, 7))
    # Its PodResources answers at once and lists nothing, for longer than a retired device stays listed by itself.
    await kubelet.restart(orderly=False, runtime_ready=7.5, sources_ready=1.0)
    await kubelet.wait_for(healthy(kubelet, 7))
    await kubelet.wait_for(lambda: held in ids(kubelet, SMALL))
    lists = kubelet.pod_resources_lists
    await kubelet.wait_for(lambda: kubelet.pod_resources_lists >= lists + 2)
    assert kubelet.resources[GPU].allocatable == 7
    kubelet.release("pod")
    await kubelet.wait_for(healthy(kubelet, 8), timeout=30)


async def test_what_a_plain_init_container_had_is_free_within_half_a_minute_of_its_pods_end(kubelet, daemon):
    daemon.profile = "h100-mig-single"
    daemon.start("--mig-strategy", "mixed")
    await kubelet.wait_for(healthy(kubelet, 56, SMALL))
    await kubelet.admit("pod", containers=[Container("init", {SMALL: 1}, "init"), Container("app", {})])
    for gpu in range(8):
        daemon.fault(gpu, mig="none")
    await kubelet.wait_for(healthy(kubelet, 7))
    lists = kubelet.pod_resources_lists
    await kubelet.wait_for(lambda: kubelet.pod_resources_lists >= lists + 4, timeout=20)
    assert kubelet.resources[GPU].allocatable == 7  # PodResources does not list it, the checkpoint does
    kubelet.release("pod")
    await kubelet.wait_for(healthy(kubelet, 8), timeout=30)


async def test_what_no_pod_holds_is_offered_under_its_new_name_seconds_after_a_restart(kubelet, daemon):
    """The former process may have answered an Allocate last that the kubelet has not written down yet: a second and a list."""
    daemon.profile = "h100-mig-single"
    daemon.start("--mig-strategy", "mixed")
    await kubelet.wait_for(healthy(kubelet, 56, SMALL))
    await kubelet.admit("pod", {SMALL: 1})
    daemon.kill()
    daemon.start("--mig-strategy", "single")
    await kubelet.wait_for(lambda: GPU in kubelet.resources and kubelet.resources[GPU].capacity == 56)
    assert kubelet.resources[GPU].allocatable == 0
    began = time.monotonic()
    await kubelet.wait_for(healthy(kubelet, 55), timeout=10)
    assert time.monotonic() - began < 3.5
    await kubelet.wait_for(lambda: len(ids(kubelet, SMALL)) == 1, timeout=10)
    assert time.monotonic() - began < 7


@pytest.mark.parametrize("seed", range(2))
async def test_no_hardware_is_held_twice_whatever_happens_in_any_order(kubelet, daemon, seed):
    """A few steps of what `test_interleavings` does in thousands, with the real daemon, sockets and files."""
    dice = random.Random(seed)
    daemon.profile = "h100-mig-single"
    flags = ("--mig-strategy", "mixed", "--pass-device-specs")
    daemon.start(*flags)
    await kubelet.wait_for(healthy(kubelet, 56, SMALL))
    cuts = dict.fromkeys(range(8), "1g")
    opened: dict[str, tuple[str, str]] = {}  # by pod: the nodes of its GPU, and of its slice or ""
    for step in range(12):
        match dice.choice(["admit", "admit", "admit", "end", "cut", "cut", "kubelet", "daemon"]):
            case "admit":
                offered = [name for name, table in kubelet.resources.items() if table.allocatable]
                if offered:
                    pod = f"pod-{step}"
                    with anyio.fail_after(10):
                        try:
                            given = await kubelet.admit(pod, {dice.choice(offered): 1})
                        except AdmissionError:
                            continue  # all are taken, or the device has just gone
                    opened[pod] = _nodes([spec.container_path for spec in given.only.response.devices])
            case "end" if opened:
                pod = dice.choice(sorted(opened))
                del opened[pod]
                kubelet.release(pod)
            case "cut":
                gpu, cut = dice.randrange(8), dice.choice(["none", "3g.40gb,3g.40gb"])
                cuts[gpu] = cut
                daemon.fault(gpu, mig=cut)
            case "kubelet":
                await kubelet.restart(orderly=False, runtime_ready=dice.choice([0.0, 2.5]), sources_ready=0.5)
            case "daemon":
                daemon.kill()
                daemon.start(*flags)
                await kubelet.wait_for(lambda: any(table.allocatable for table in kubelet.resources.values()))
        for gpu_node in {node for node, _ in opened.values()}:
            slices = [part for node, part in opened.values() if node == gpu_node]
            assert len(slices) == 1 or (len(set(slices)) == len(slices) and "" not in slices), opened
    began = time.monotonic()
    for pod in opened:
        kubelet.release(pod)
    count = {"none": (GPU, 1), "1g": (SMALL, 7), "3g.40gb,3g.40gb": ("nvidia.com/mig-3g.40gb", 2)}
    wanted: dict[str, int] = {}
    for cut in cuts.values():
        name, number = count[cut]
        wanted[name] = wanted.get(name, 0) + number
    for name, number in wanted.items():
        await kubelet.wait_for(healthy(kubelet, number, name), timeout=30 - (time.monotonic() - began))


def _nodes(paths: list[str]) -> tuple[str, str]:
    (gpu,) = [path for path in paths if path.removeprefix("/dev/nvidia").isdigit()]
    return gpu, next((path for path in reversed(paths) if "nvidia-caps/" in path), "")
