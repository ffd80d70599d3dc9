"""Several resources of one node, each with a plugin's socket of its own."""

import pytest

from demo.stand_in_kubelet import AdmissionError

from .fake_plugin import healthy, plugin

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.10gb"
SHARED = "nvidia.com/gpu.shared"


@pytest.fixture(params=["1.36", "1.37"])
async def kubelet(kubelets, request):
    return await kubelets(generation=request.param)


def counts(kubelet):
    return {name: (state.capacity, state.allocatable) for name, state in kubelet.resources.items()}


async def test_each_resource_is_counted_and_given_from_its_own_list(kubelet):
    async with (
        plugin(kubelet, "a.sock", healthy("a", "b")) as gpus,
        plugin(kubelet, "b.sock", healthy("m"), resource=MIG) as slices,
        plugin(kubelet, "c.sock", healthy("a::0", "a::1"), resource=SHARED),
    ):
        assert counts(kubelet) == {GPU: (2, 2), MIG: (1, 1), SHARED: (2, 2)}
        admission = await kubelet.admit("p", {GPU: 2, MIG: 1})
        assert {each.resource: set(each.ids) for each in admission.allocations} == {GPU: {"a", "b"}, MIG: {"m"}}
        assert (gpus.called("allocate"), slices.called("allocate")) == ([{"a", "b"}], [{"m"}])
        with pytest.raises(AdmissionError, match=f"unavailable for {MIG}"):
            await kubelet.admit("q", {SHARED: 1, MIG: 1})
        assert set((await kubelet.admit("r", {SHARED: 2})).ids) == {"a::0", "a::1"}


async def test_one_withdrawn_has_no_capacity_and_may_come_back(kubelet):
    async with (
        plugin(kubelet, "a.sock", healthy("a")),
        plugin(kubelet, "b.sock", healthy("m", "n"), resource=MIG) as slices,
    ):
        slices.send([])
        await kubelet.wait_for(lambda: counts(kubelet)[MIG] == (0, 0))
        slices.send(None)
        await kubelet.wait_for(lambda: not kubelet.resources[MIG].streams)
        assert counts(kubelet) == {GPU: (1, 1), MIG: (0, 0)}
        with pytest.raises(AdmissionError):
            await kubelet.admit("p", {MIG: 1})
        slices.devices = healthy("o")
        await slices.register()
        await kubelet.wait_for(lambda: counts(kubelet) == {GPU: (1, 1), MIG: (1, 1)})
    kubelet.check()
