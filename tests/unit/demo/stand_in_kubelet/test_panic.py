"""Panics of the kubelet, and their effects (contract 4.6)."""

import asyncio

import pytest

from demo.stand_in_kubelet import AdmissionError, EventKind, KubeletPanicError

from .fake_plugin import device, healthy, plugin

GPU = "nvidia.com/gpu"
OTHER = "nvidia.com/mig-1g.10gb"


def panics(kubelet):
    return [event.text for event in kubelet.events if event.kind is EventKind.PANICKED]


async def test_an_id_that_leaves_while_a_pod_holds_it_ends_a_strict_kubelet(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        (held,) = (await kubelet.admit("p", {GPU: 1})).ids
        fake.send(healthy("c"))
        await kubelet.wait_for(lambda: kubelet.panicked)
        assert not kubelet.running
        assert panics(kubelet) == [kubelet.panicked] == [f"{GPU}: ['{held}'] left the list while pods hold them"]
        await asyncio.wait_for(fake.was_dropped.wait(), 10)
        for path in (kubelet.socket, kubelet.pod_resources_socket):
            assert path.is_socket()  # left behind, dead
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_unix_connection(path)
    with pytest.raises(AssertionError, match="vanished from the list while pods may hold them"):
        kubelet.check()


async def test_a_panic_fails_whoever_awaits_the_kubelet(kubelet):
    async with plugin(kubelet, devices=healthy("a")) as fake:
        await kubelet.admit("p", {GPU: 1})
        waiting = asyncio.create_task(kubelet.wait_for(lambda: False, 30))
        await asyncio.sleep(0)
        fake.send([])
        with pytest.raises(KubeletPanicError, match=r"\['a'\] left the list while pods hold them"):
            await waiting
        with pytest.raises(KubeletPanicError):
            await kubelet.admit("q", {GPU: 1})
        with pytest.raises(KubeletPanicError):
            await kubelet.wait_for(lambda: kubelet.running)
    await kubelet.restart()
    assert not kubelet.panicked
    assert await kubelet.wait_for(lambda: kubelet.running)
    assert list(kubelet.pods) == ["p"]


async def test_an_id_may_leave_once_its_pod_ended_and_while_another_resource_has_it(kubelet):
    async with (
        plugin(kubelet, "a.sock", healthy("x", "y")) as one,
        plugin(kubelet, "b.sock", healthy("x"), resource=OTHER),
    ):
        await kubelet.admit("p", {GPU: 2})
        await kubelet.admit("q", {OTHER: 1})
        kubelet.release("p")
        one.send(healthy("y"))
        await kubelet.wait_for(lambda: kubelet.resources[GPU].capacity == 1)
    assert kubelet.running
    kubelet.check()


async def test_a_held_id_missing_after_a_restart_ends_a_strict_kubelet_by_any_policy(kubelet):
    async with plugin(kubelet, devices=healthy("a")) as fake:
        await kubelet.admit("p", {GPU: 1})
        fake.devices = healthy("b")
        await kubelet.restart()
        await fake.serve()
        await fake.register()
        await kubelet.wait_for(lambda: kubelet.panicked)
    assert "held by pods, are not listed after a restart" in kubelet.violations[0]


async def test_an_id_that_leaves_during_its_allocate_ends_any_kubelet(kubelets):
    kubelet = await kubelets(strict=False)
    async with plugin(kubelet, devices=healthy("a")) as fake:
        fake.may_allocate.clear()
        admission = asyncio.create_task(kubelet.admit("p", {GPU: 1}))
        await asyncio.wait_for(fake.allocating.wait(), 10)
        fake.send(healthy("b"))
        with pytest.raises(KubeletPanicError, match=r"\['a'\] left the list during their Allocate"):
            await admission
        assert not kubelet.running
        assert kubelet.socket.is_socket()
        with pytest.raises(ConnectionRefusedError):
            await fake.register()


class TestNotStrict:
    """Where a real kubelet panics, and nowhere else."""

    async def test_an_id_that_a_pod_holds_may_leave_and_is_written_down(self, kubelets):
        kubelet = await kubelets(strict=False)
        async with plugin(kubelet, devices=healthy("a")) as fake:
            await kubelet.admit("p", {GPU: 1})
            fake.send(healthy("b"))
            await kubelet.wait_for(lambda: kubelet.violations)
            assert kubelet.pod_health("p") == {"main": {GPU: {"a": "Healthy"}}}  # the kubelet's default for a lost id
        assert "['a'] vanished" in kubelet.violations[0]
        assert not kubelet.panicked

    async def test_one_missing_after_a_restart_ends_a_numa_aware_kubelet_again_and_again(self, kubelets):
        kubelet = await kubelets(numa_policy="best-effort", strict=False)
        async with plugin(kubelet, devices=[device("a", "Healthy", 0)]) as fake:
            await kubelet.admit("p", {GPU: 1})
            fake.devices = [device("b", "Healthy", 0)]
            for _ in range(2):
                await kubelet.restart()
                await fake.serve()
                await fake.register()
                await kubelet.wait_for(lambda: kubelet.panicked)
                await fake.close()
        assert len(panics(kubelet)) == 2
        assert kubelet.violations

    @pytest.mark.parametrize(
        ("policy", "numa", "fatal"), [("best-effort", (0,), True), ("best-effort", (), False), ("none", (0,), False)]
    )
    async def test_a_pod_admitted_again_without_its_id_ends_a_kubelet_that_asks_for_hints(
        self, kubelets, policy, numa, fatal
    ):
        kubelet = await kubelets(numa_policy=policy, strict=False)
        async with plugin(kubelet, devices=[device("a", "Healthy", *numa)]) as fake:
            await kubelet.admit("p", {GPU: 1})
            fake.send([device("b", "Healthy", *numa)])
            await kubelet.wait_for(lambda: kubelet.resources[GPU].lists == 2)
            kubelet.exit_containers("p")
            with pytest.raises(KubeletPanicError if fatal else AdmissionError):
                await kubelet.admit("p", {GPU: 1})
        assert bool(kubelet.panicked) == fatal
        assert ("p" in kubelet.pods) == fatal  # a refused pod has failed, and a pod without a decision stays
