"""The bindings that the host lists show which GPUs vanished, and when to open the driver again."""

import pytest

from gpu_plugin.devices.device import PLACEHOLDER
from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml.port import Handle
from gpu_plugin.nvml.roster import FIRST_WAIT, MAX_TRIES, WAIT_FACTOR, Bindings, Watched

ONE, TWO, NEW = "00000000:1B:00.0", "00000000:3D:00.0", "00000000:9A:00.0"


def watched(bus_id, *, handle=1, asked_under=None, binding=None):
    gpu = Gpu(f"GPU-{bus_id}", 0, pci_bus_id=bus_id)
    return Watched(gpu, None if handle is None else Handle(handle), asked_under=asked_under, binding=binding)


def opened(told, gpus):
    bus = Bindings(dict(told))
    bus.opened(gpus, 0)
    return bus


def tries(bus, gpus, rounds):
    """Return the rounds in which the driver is opened again, if no opening helps."""
    found = []
    for now in range(1, rounds):
        if bus.due_bus_ids(gpus, now):
            found.append(now)
            bus.opened(gpus, now)
    return found


@pytest.mark.parametrize(
    ("told", "handle", "binding", "vanished"),
    [
        ({ONE: 1, TWO: 2}, 1, None, False),
        ({TWO: 2}, 1, 1, True),  # the host listed it before
        ({}, 1, 1, True),
        ({TWO: 2}, None, None, True),  # the host lists others, and it does not answer
        ({TWO: 2}, 1, None, False),  # it answers, so the host that never listed it is wrong
        ({}, None, None, False),  # a host that lists no GPU
    ],
)
def test_gpus_that_have_vanished(told, handle, binding, vanished):
    assert Bindings(told).vanished(watched(ONE, handle=handle, binding=binding)) is vanished


def test_a_gpu_whose_bus_id_is_not_known_never_vanishes():
    assert not Bindings({TWO: 2}).vanished(Watched(Gpu(f"{PLACEHOLDER}0", 0), None))


def test_bus_ids_are_compared_in_either_case():
    gpu = Gpu("GPU-low", 0, pci_bus_id=ONE.lower())
    assert Bindings({ONE: 7}).binding(gpu) == 7
    assert not Bindings({ONE: 7}).vanished(Watched(gpu, None))


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        ({ONE: 1, TWO: 2}, [watched(ONE), watched(TWO)]),
        ({}, [watched(ONE, handle=None)]),
        ({ONE: 1, TWO: 2}, [watched(ONE, handle=None, asked_under=1), watched(TWO)]),  # lost under the same binding
        ({ONE: 1, TWO: 2}, [watched(ONE), Watched(Gpu(f"{PLACEHOLDER}1", 1), None)]),  # its bus id is not known
    ],
)
def test_no_opening_is_due_for_known_bindings(listed, gpus):
    assert tries(opened(listed, gpus), gpus, 1000) == []


def test_an_opening_for_an_unknown_gpu_is_due_at_once_and_then_less_often():
    gpus = [watched(ONE)]
    bus = opened({ONE: 1}, gpus)
    bus.bindings = {ONE: 1, NEW: 5}
    assert bus.due_bus_ids(gpus, 1) == (NEW,)
    assert tries(bus, gpus, 1000) == [1, 1 + FIRST_WAIT, 1 + FIRST_WAIT + FIRST_WAIT * WAIT_FACTOR]
    assert len(tries(opened({ONE: 1, NEW: 5}, gpus), gpus, 1000)) == MAX_TRIES - 1, "the first opening counts"


def test_no_further_opening_is_due_for_a_gpu_that_was_found():
    gpus = [watched(ONE)]
    bus = opened({ONE: 1}, gpus)
    bus.bindings = {ONE: 1, NEW: 5}
    assert bus.due_bus_ids(gpus, 1) == (NEW,)
    gpus.append(watched(NEW))
    bus.opened(gpus, 1)
    assert tries(bus, gpus, 1000) == []


def test_another_binding_makes_an_opening_due_again():
    gpus = [watched(ONE)]
    bus = opened({ONE: 1, NEW: 5}, gpus)
    tries(bus, gpus, 1000)
    bus.bindings = {ONE: 1, NEW: 6}
    assert bus.due_bus_ids(gpus, 1000) == (NEW,)


def test_an_opening_is_due_once_a_gpu_did_not_answer_under_its_new_binding():
    gpu = watched(ONE, handle=None, asked_under=1)
    gpus = [gpu, watched(TWO)]
    bus = opened({ONE: 1, TWO: 2}, gpus)
    bus.bindings = {ONE: 8, TWO: 2}
    assert bus.due_bus_ids(gpus, 1) == ()
    gpu.asked_under = 8
    assert bus.due_bus_ids(gpus, 2) == (ONE,)
    assert tries(bus, gpus, 1000)[0] == 1
    gpu.handle = Handle(1)
    assert bus.due_bus_ids(gpus, 2000) == ()


def test_no_opening_is_due_for_a_gpu_that_is_lost_again():
    gpu = watched(ONE, handle=None, asked_under=8)
    bus = opened({TWO: 2}, [gpu])
    bus.bindings = {ONE: 8, TWO: 2}
    assert bus.due_bus_ids([gpu, watched(TWO)], 1) == (ONE,)
    gpu.handle = Handle(1)
    bus.opened([gpu, watched(TWO)], 1)
    bus.due_bus_ids([gpu, watched(TWO)], 2)
    gpu.handle = None
    assert tries(bus, [gpu, watched(TWO)], 1000) == []


def test_a_new_binding_makes_all_bindings_without_a_known_gpu_due():
    gpus = [watched(ONE), Watched(Gpu(f"{PLACEHOLDER}1", 1), None)]
    bus = opened({ONE: 1, TWO: 2}, gpus)
    bus.bindings = {ONE: 1, TWO: 2, NEW: 3}
    assert set(bus.due_bus_ids(gpus, 1)) == {TWO, NEW}
