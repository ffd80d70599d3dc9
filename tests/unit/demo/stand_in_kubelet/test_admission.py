"""Admission: the calls of a plugin, their order, and the effects of the answers (contract 4)."""

import asyncio
import re

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from demo.stand_in_kubelet import AdmissionError, Container
from gpu_plugin.kubelet import messages as m

from .fake_plugin import device, healthy, plugin

GPU = "nvidia.com/gpu"
ON_0 = {"a", "b", "c"}
ON_1 = {"d", "e", "f"}
NOWHERE = {"g", "h"}
EIGHT = [
    *(device(i, "Healthy", 0) for i in sorted(ON_0)),
    *(device(i, "Healthy", 1) for i in sorted(ON_1)),
    *(device(i) for i in sorted(NOWHERE)),
]


@pytest.mark.parametrize(
    ("request_", "available", "must"),
    [(2, ON_0, set()), (3, None, None), (4, ON_0 | ON_1, set()), (7, ON_0 | ON_1 | NOWHERE, ON_0 | ON_1)],
)
async def test_asks_for_a_preference_as_the_real_one_was_seen_to(kubelets, request_, available, must):
    kubelet = await kubelets(numa_policy="best-effort")
    async with plugin(kubelet, devices=EIGHT) as fake:
        admission = await kubelet.admit("p", {GPU: request_})
        asked = fake.called("preferred")
        if available is None:
            assert asked == []
            assert admission.only.ask is None
            assert set(admission.ids) == ON_0
        else:
            (ask,) = asked
            assert set(ask.available_device_ids) == available
            assert set(ask.must_include_device_ids) == must
            assert ask.allocation_size == request_
        assert fake.called("allocate") == [set(admission.ids)]
        assert len(admission.ids) == request_
    kubelet.check()


async def test_gives_the_answer_as_plain_data_with_its_latencies(kubelet):
    def allocate(ids):
        (one,) = ids
        return [
            m.ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": one},
                mounts=[m.Mount("/in", "/out", True)],
                devices=[m.DeviceSpec("/dev/nvidia0", "/dev/nvidia0", "rw")],
                annotations={"k": "v"},
                cdi_devices=[m.CdiDevice("nvidia.com/gpu=0")],
            )
        ]

    async with plugin(kubelet, devices=healthy("a", "b"), allocate=allocate, pre_start=True) as fake:
        fake.prefer = lambda ask: ["b"]
        admission = await kubelet.admit("p", {GPU: 1})
        only = admission.only
        assert (admission.ids, only.preferred) == (("b",), ("b",))
        assert only.response.envs == {"NVIDIA_VISIBLE_DEVICES": "b"}
        assert (only.response.mounts[0].host_path, only.response.devices[0].permissions) == ("/out", "rw")
        assert (only.response.annotations, only.response.cdi_devices) == ({"k": "v"}, ("nvidia.com/gpu=0",))
        assert admission.seconds > 0
        assert [name for name, _ in fake.calls] == ["preferred", "allocate", "pre start"]
    kubelet.check()


@pytest.mark.parametrize(
    ("answer", "violation"),
    [
        ([], ""),
        (["a"], "1 devices for a size of 2"),
        (["a", "a"], "names a device twice"),
        (["a", "z"], "['z'], which were not on offer"),
        (["a", "b", "c"], "3 devices for a size of 2"),
    ],
)
async def test_a_wrong_preference_never_fails_a_pod(kubelet, answer, violation):
    async with plugin(kubelet, devices=healthy("a", "b", "c")) as fake:
        fake.prefer = lambda ask: answer
        assert len((await kubelet.admit("p", {GPU: 2})).ids) == 2
    assert bool(kubelet.violations) == bool(violation)
    assert violation in "".join(kubelet.violations)


async def test_a_preference_that_is_refused_fails_the_pod(kubelet):
    async with plugin(kubelet, devices=healthy("a")) as fake:
        fake.prefer = lambda ask: GRPCError(Status.UNIMPLEMENTED, "no")
        expected = (
            "Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: "
            "rpc error: code = Unimplemented desc = no, which is unexpected"
        )
        with pytest.raises(AdmissionError, match=f"^{re.escape(expected)}$"):
            await kubelet.admit("p", {GPU: 1})
    assert kubelet.violations


async def test_a_refused_allocate_fails_the_pod_and_frees_its_devices(kubelet):
    async with plugin(kubelet, devices=healthy("a")) as fake:
        works = fake.allocate
        fake.allocate = lambda ids: GRPCError(Status.INVALID_ARGUMENT, "a is unhealthy")
        expected = "Allocate failed due to rpc error: code = InvalidArgument desc = a is unhealthy, which is unexpected"
        with pytest.raises(AdmissionError, match=f"^{re.escape(expected)}$") as raised:
            await kubelet.admit("p", {GPU: 1})
        assert raised.value.reason == "UnexpectedAdmissionError"
        assert not kubelet.pods
        fake.allocate = works
        await kubelet.admit("p", {GPU: 1})
        with pytest.raises(AdmissionError, match=r"unavailable for nvidia.com/gpu. Requested: 2, Available: 0"):
            await kubelet.admit("q", {GPU: 2})
        kubelet.release("p")
        await kubelet.admit("q", {GPU: 1})
    kubelet.check()


async def test_an_answer_without_a_container_keeps_its_devices_taken(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b"), allocate=lambda ids: []):
        with pytest.raises(AdmissionError, match="no containers return in allocation response"):
            await kubelet.admit("p", {GPU: 2})
        assert kubelet.resources[GPU].free == set()
    assert "answered with 0 responses" in kubelet.violations[0]


async def test_says_what_a_runtime_would_trip_over(kubelet):
    def allocate(ids):
        node = m.DeviceSpec("/dev/nvidia0", "/dev/nvidia0", "rw")
        wrong = m.DeviceSpec("/dev/x", "dev/x", "x")
        return [m.ContainerAllocateResponse(devices=[node, node, wrong], cdi_devices=[m.CdiDevice("gpu=0")])] * 2

    async with plugin(kubelet, devices=healthy("a"), allocate=allocate):
        await kubelet.admit("p", {GPU: 1})
    said = "\n".join(kubelet.violations)
    for part in ("2 responses", "/dev/nvidia0 twice", "'dev/x', which is not absolute", "permissions 'x'", "'gpu=0'"):
        assert part in said


async def test_init_containers_leave_their_devices_to_the_others(kubelet):
    async with plugin(kubelet, devices=healthy(*"abcdefgh")) as fake:
        containers = [
            Container("init", {GPU: 2}, "init"),
            Container("sidecar", {GPU: 1}, "sidecar"),
            Container("c1", {GPU: 1}),
            Container("c2", {GPU: 3}),
        ]
        admission = await kubelet.admit("p", containers=containers)
        init, sidecar, c1, c2 = (set(allocation.ids) for allocation in admission.allocations)
        assert sidecar | c1 == init
        assert not sidecar & c1
        assert len(c2) == 3
        assert not c2 & init
        assert len(fake.called("allocate")) == 4
        assert len(fake.called("preferred")) == 2  # reuse that suffices needs no answer
        assert set(kubelet.pod_health("p")) == {"c1", "c2"}
    kubelet.check()


@pytest.mark.parametrize(
    ("policy", "request_", "admitted"),
    [("restricted", 3, True), ("restricted", 7, False), ("single-numa-node", 3, True), ("single-numa-node", 4, False)],
)
async def test_numa_policies_refuse_what_they_cannot_align(kubelets, policy, request_, admitted):
    kubelet = await kubelets(numa_policy=policy)
    async with plugin(kubelet, devices=EIGHT):
        if admitted:
            assert (await kubelet.admit("p", {GPU: request_})).only.numa_nodes == {0}
        else:
            with pytest.raises(AdmissionError, match="Resources cannot be allocated with Topology locality") as raised:
                await kubelet.admit("p", {GPU: request_})
            assert raised.value.reason == "TopologyAffinityError"


async def test_two_resources_that_set_one_variable_differently_are_a_violation(kubelet):
    other = "nvidia.com/mig-1g.10gb"
    async with (
        plugin(kubelet, "a.sock", healthy("a"), resource=GPU),
        plugin(kubelet, "b.sock", healthy("b"), resource=other),
    ):
        await kubelet.admit("p", {GPU: 1, other: 1})
    assert "two resources of one container set IDS" in kubelet.violations[0]


async def test_admissions_are_serial(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        fake.may_allocate.clear()
        both = asyncio.gather(kubelet.admit("p", {GPU: 1}), kubelet.admit("q", {GPU: 1}))
        await asyncio.wait_for(fake.allocating.wait(), 1)
        assert len(fake.called("preferred")) == 1
        fake.may_allocate.set()
        one, other = await both
        assert {*one.ids, *other.ids} == {"a", "b"}


async def test_a_failed_pre_start_stops_the_container(kubelet):
    async with plugin(kubelet, devices=healthy("a"), pre_start=True) as fake:
        fake.pre_start_error = GRPCError(Status.INTERNAL, "no reset")
        expected = "device plugin PreStartContainer rpc failed with err: rpc error: code = Internal desc = no reset"
        with pytest.raises(AdmissionError, match=f"^{re.escape(expected)}$") as raised:
            await kubelet.admit("p", {GPU: 1})
        assert raised.value.reason == "CreateContainerError"
        await kubelet.admit("q", {GPU: 1}, start=False)
        assert len(fake.called("pre start")) == 1


async def test_without_numa_policy_every_free_healthy_device_is_on_offer(kubelet):
    async with plugin(kubelet, devices=[*EIGHT[:7], device("h", "Unhealthy")]) as fake:
        first = await kubelet.admit("p", {GPU: 1})
        await kubelet.admit("q", {GPU: 6})
        offers = [set(ask.available_device_ids) for ask in fake.called("preferred")]
        everything = ON_0 | ON_1 | {"g"}
        assert offers == [everything, everything - set(first.ids)]


async def test_an_unknown_numa_node_sent_as_minus_one_cannot_be_aligned(kubelets):
    kubelet = await kubelets(numa_policy="single-numa-node")
    async with plugin(kubelet, devices=[device("a", "Healthy", -1)]):
        with pytest.raises(AdmissionError, match="Topology locality"):
            await kubelet.admit("p", {GPU: 1})
