"""Lists: their effect on the table, and breaches of the contract (contract 3, 5, 7)."""

import pytest

from demo.stand_in_kubelet import EventKind
from demo.stand_in_kubelet.registration import is_extended_resource_name
from gpu_plugin.kubelet import checkpoint, pod_resources, wire

from .fake_plugin import device, healthy, plugin

GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("listed", "capacity", "allocatable", "violation"),
    [
        ([], 0, 0, ""),
        (healthy("a", "a"), 1, 1, "'a' is in one list twice"),
        ([device("a"), device("a", "Unhealthy")], 2, 1, "'a' is in one list twice"),
        ([device("a", "healthy")], 1, 0, "health 'healthy'"),
        ([device("a", "")], 1, 0, "health ''"),
        ([device("a", "Unknown")], 1, 0, "health 'Unknown'"),
        ([device("a" * 63)], 1, 1, ""),
        ([device("a" * 64)], 1, 1, "64 characters"),
        ([device("")], 1, 1, "without an id"),
        ([device("a", "Healthy", -1)], 1, 1, "NUMA node -1"),
        ([device("a", "Healthy", 0)], 1, 1, ""),
    ],
)
async def test_takes_any_list_and_says_what_is_wrong_with_it(kubelet, listed, capacity, allocatable, violation):
    async with plugin(kubelet, devices=listed):
        state = kubelet.resources[GPU]
        assert (state.capacity, state.allocatable) == (capacity, allocatable)
    assert len(kubelet.violations) == bool(violation)
    assert violation in "".join(kubelet.violations)


async def test_an_unchanged_list_is_a_violation_on_one_stream_only(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        await kubelet.drop_stream(GPU)
        await fake.register()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].lists == 2, 1)
        kubelet.check()
        fake.send(healthy("b", "a"))
        await kubelet.wait_for(lambda: kubelet.violations, 1)
    assert "an unchanged list of 2 devices" in kubelet.violations[0]


async def test_an_unchanged_list_has_the_checkpoint_written_which_is_of_use_once_after_what_it_may_lack(kubelet):
    """Its twin on the real kubelet is in tests/cluster/test_kubelet_books.py."""
    listed = [device("a"), device("b", "Unhealthy")]
    async with plugin(kubelet, devices=listed) as fake:

        async def again() -> int:
            lists, (_, written) = kubelet.resources[GPU].lists, checkpoint.read(kubelet.directory)
            fake.send(listed)
            await kubelet.wait_for(lambda: kubelet.resources[GPU].lists > lists, 1)
            assert (kubelet.resources[GPU].capacity, kubelet.resources[GPU].allocatable) == (2, 1)
            assert checkpoint.read(kubelet.directory)[1] != written
            return len(kubelet.violations)

        assert [await again(), await again()] == [0, 1]
        await kubelet.admit("p", {GPU: 1})
        assert [await again(), await again()] == [1, 1], "the file names it, and nobody asked PodResources"
        assert await pod_resources.allocated(kubelet.pod_resources_socket) == {(GPU, "a")}
        assert [await again(), await again()] == [1, 2], "nothing but the admission speaks for it"
        kubelet.release("p")
        assert await pod_resources.allocated(kubelet.pod_resources_socket) == set()
        assert [await again(), await again()] == [2, 3], "the file named a pod that had ended"
        await kubelet.drop_stream(GPU)
        await fake.register()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1 and kubelet.resources[GPU].healthy, 1)
        assert [await again(), await again()] == [3, 4]
    assert {text.partition(": ")[2] for text in kubelet.violations} == {"an unchanged list of 2 devices was sent again"}


async def test_tells_what_changed_and_when(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        fake.send([device("a", "Unhealthy"), device("b")])
        await kubelet.wait_for(lambda: kubelet.resources[GPU].lists == 2, 1)
        lists = [event for event in kubelet.events if event.kind is EventKind.LIST]
        assert [dict(event.changed) for event in lists] == [{"a": "Healthy", "b": "Healthy"}, {"a": "Unhealthy"}]
        assert lists[0].at < lists[1].at


async def test_a_list_over_four_mebibytes_ends_the_stream(kubelet):
    async with plugin(kubelet, devices=healthy("a")) as fake:
        fake.send([device(f"{n:0100000}") for n in range(wire.MAX_MESSAGE_BYTES // 100_000 + 1)])
        await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams, 10)
        assert (kubelet.resources[GPU].capacity, kubelet.resources[GPU].allocatable) == (1, 0)
    assert "received message larger than max" in kubelet.violations[0]


async def test_pod_health_follows_the_lists(kubelet):
    async with plugin(kubelet, devices=healthy("a")) as fake:
        await kubelet.admit("p", {GPU: 1})
        shown = [kubelet.pod_health("p")["main"][GPU]["a"]]
        for health in ("Unhealthy", "Healthy", "Unhealthy"):
            fake.send([device("a", health)])
            await kubelet.wait_for(lambda: kubelet.resources[GPU].devices["a"].health == fake.devices[0].health, 1)
            shown.append(kubelet.pod_health("p")["main"][GPU]["a"])
        await fake.close()
        await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams, 1)
        shown.append(kubelet.pod_health("p")["main"][GPU]["a"])
    assert shown == ["Healthy", "Unhealthy", "Healthy", "Unhealthy", "Unhealthy"]


GOOD_NAMES = ("GPU", "a" * 63, "gpu.shared", "mig-1g.10gb.me")
BAD_NAMES = (
    *("gpu", "nvidia.com/gpu/x", "kubernetes.io/gpu", "x.kubernetes.io/gpu", "requests.nvidia.com/gpu", "/gpu"),
    *("NVIDIA.com/gpu", "nvidia.com/" + "a" * 64, "nvidia.com/-a", "nvidia.com/", "hugepages-2Mi", ""),
    *("nvidia.com/mig-1g.10gb+me", "a" * 245 + "/g", "nvidia.com/gpu\n", "nvidia..com/gpu"),
)


def test_resource_names():
    for name in (*(f"nvidia.com/{name}" for name in GOOD_NAMES), "a" * 244 + "/g"):
        assert is_extended_resource_name(name), name
    for name in BAD_NAMES:
        assert not is_extended_resource_name(name), name


async def test_an_id_may_leave_when_no_pod_holds_it(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        fake.send(healthy("a"))
        await kubelet.wait_for(lambda: kubelet.resources[GPU].lists == 2, 1)
        assert [event.text for event in kubelet.events if event.kind is EventKind.RETIRED] == ["b"]
    kubelet.check()
