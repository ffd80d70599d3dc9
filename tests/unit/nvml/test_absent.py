"""A monitor finds which GPUs the node should have and has not."""

from gpu_plugin.devices.node import Gpu

from .monitored import NEVER, Bench, remembered

GONE = Gpu("GPU-gone", 8, pci_bus_id="00000000:F0:00.0", model="NVIDIA H100")


def absent(bench):
    return [(gpu.uuid, gpu.pci_bus_id) for gpu in bench.monitor.node.absent]


async def test_a_gpu_of_before_the_boot_that_nothing_has_now_is_absent_until_an_operator_drops_it():
    bench = Bench(poll=NEVER, before=(*remembered(), GONE))
    await bench.monitor.open()
    assert absent(bench) == [("GPU-gone", GONE.pci_bus_id)]
    assert not bench.monitor.dismiss("GPU-other")
    assert bench.monitor.dismiss("GPU-gone")
    assert absent(bench) == []
    assert bench.nodes[-1].absent == (), "which is passed on"
    bench.monitor.close()


async def test_a_gpu_on_the_bus_that_the_driver_does_not_list_is_absent_until_it_does(monkeypatch):
    bench = Bench(poll=NEVER)
    bus = {gpu.pci_bus_id: "nvidia" for gpu in bench.node.profile.gpus} | {GONE.pci_bus_id: ""}
    monkeypatch.setattr(bench.monitor.host, "pci_gpus", lambda: bus)
    await bench.monitor.open()
    assert absent(bench) == [("", GONE.pci_bus_id)]
    async with bench.running():
        bus[GONE.pci_bus_id] = "vfio-pci"
        bench.monitor.look_now()
        await bench.until(lambda: not bench.nodes[-1].absent)


async def test_a_gpu_that_vanished_and_is_listed_no_more_is_absent():
    async with Bench(poll=0.01, retention=0.0).watching(rounds=0) as bench:
        bench.node.vanish(3)
        await bench.until(lambda: len(bench.nodes[-1].gpus) == 7)
        await bench.until(lambda: [gpu.uuid for gpu in bench.nodes[-1].absent] == [bench.uuids[3]])


async def test_without_the_bus_of_the_host_remembered_gpus_are_compared(monkeypatch):
    bench = Bench(poll=NEVER, before=(GONE,))
    monkeypatch.setattr(bench.monitor.host, "pci_gpus", lambda: None)
    await bench.monitor.open()
    assert absent(bench) == [("GPU-gone", GONE.pci_bus_id)]
    bench.monitor.close()
