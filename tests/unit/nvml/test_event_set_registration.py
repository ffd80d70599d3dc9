"""The driver's answer to a registration, and its consequence for the GPU and the event set."""

import pytest

from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml.events import WANTED, Outcome, Registered, register, register_warily
from gpu_plugin.nvml.port import Event, EventSet, Handle, NvmlError

SET, ALONE = EventSet(7), EventSet(8)
GPU = Handle(0x1000)
XID = int(EventType.XID_CRITICAL)
REGISTERED = Registered(Outcome.REGISTERED)
EVENT = Event(GPU, XID, 48)


class Registering:
    """A driver that supports these event types. `refused` has return codes by call."""

    def __init__(self, supported=0xFF9F, *, event=None, **refused):
        self.supported = supported
        self.event = event
        self.refused = refused
        self.asked = []
        self.sets = set()

    def _refuse(self, call, code=0):
        code = self.refused.get(call, code)
        if code:
            raise NvmlError(code, call)

    def supported_event_types(self, handle):
        self._refuse("types")
        return self.supported

    def register_events(self, handle, mask, event_set):
        self.asked.append((handle, mask, event_set))
        self._refuse("alone" if event_set == ALONE else "register")
        if mask != XID:
            self._refuse("all")

    def event_set(self):
        self._refuse("event_set")
        self.sets.add(ALONE)
        return ALONE

    def free_event_set(self, events):
        self.sets.remove(events)
        self._refuse("free")

    def wait(self, events, timeout_ms):
        assert (events, timeout_ms) == (ALONE, 0)
        self._refuse("wait")
        if self.event is not None:
            return self.event
        raise NvmlError(Return.TIMEOUT, "wait")


@pytest.mark.parametrize(
    ("supported", "mask"),
    [
        (0xFF9F, EventType.DOUBLE_BIT_ECC | EventType.XID_CRITICAL | 0xFF00),
        (0x1F, EventType.DOUBLE_BIT_ECC | EventType.XID_CRITICAL),
        (0x8, EventType.XID_CRITICAL),
        (0xFFFF_FFFF_0008, EventType.XID_CRITICAL),
    ],
)
def test_wanted_and_supported_types_are_registered(supported, mask):
    driver = Registering(supported)
    assert register(driver, GPU, SET) == REGISTERED  # type: ignore[arg-type]
    assert driver.asked == [(GPU, mask, SET)]
    assert type(driver.asked[0][1]) is int


@pytest.mark.parametrize("supported", [0, 0x1, 0x10 | 0x4])
def test_a_part_without_any_health_event_is_not_asked(supported):
    driver = Registering(supported)
    answer = register(driver, GPU, SET)  # type: ignore[arg-type]
    assert answer == Registered(Outcome.UNSUPPORTED, "it reports no events")
    assert driver.asked == []


@pytest.mark.parametrize(
    ("refused", "outcome"),
    [
        ({"types": Return.NOT_SUPPORTED}, Outcome.UNSUPPORTED),
        ({"types": Return.UNKNOWN}, Outcome.REFUSED),
        ({"types": Return.GPU_IS_LOST}, Outcome.REFUSED),
        ({"register": Return.NOT_SUPPORTED}, Outcome.UNSUPPORTED),
        ({"register": Return.INVALID_ARGUMENT}, Outcome.REFUSED),
        ({"register": Return.UNKNOWN}, Outcome.UNDEFINED),
        ({"register": Return.GPU_IS_LOST}, Outcome.UNDEFINED),
        ({"all": Return.UNKNOWN}, Outcome.UNDEFINED),
    ],
)
def test_only_lack_of_support_is_a_final_answer(refused, outcome):
    answer = register(Registering(**refused), GPU, SET)  # type: ignore[arg-type]
    assert answer.outcome is outcome
    assert ("registering for them failed" in answer.why) is (outcome is not Outcome.UNSUPPORTED)


def test_if_the_driver_refuses_a_type_only_xids_are_registered():
    driver = Registering(all=Return.NOT_SUPPORTED)
    assert register(driver, GPU, SET) == REGISTERED  # type: ignore[arg-type]
    assert [mask for _, mask, _ in driver.asked] == [int(WANTED), XID]


@pytest.mark.parametrize(
    ("refused", "answer"),
    [
        ({}, Registered(Outcome.REGISTERED, event=EVENT)),
        ({"alone": Return.UNKNOWN}, Outcome.REFUSED),
        ({"alone": Return.NOT_SUPPORTED}, Outcome.UNSUPPORTED),
        ({"wait": Return.GPU_IS_LOST}, Outcome.REFUSED),
        ({"event_set": Return.UNKNOWN}, Outcome.REFUSED),
        ({"register": Return.UNKNOWN}, Outcome.UNDEFINED),
        ({"free": Return.UNKNOWN}, Registered(Outcome.REGISTERED, event=EVENT)),
    ],
)
def test_a_suspect_gpu_is_first_registered_in_a_set_of_its_own(refused, answer):
    driver = Registering(event=EVENT, **refused)
    found = register_warily(driver, GPU, SET)  # type: ignore[arg-type]
    assert answer in (found, found.outcome)
    assert driver.sets == set(), "what was made for it is freed"
    touched = SET in {event_set for *_, event_set in driver.asked}
    assert touched is (found.outcome in (Outcome.REGISTERED, Outcome.UNDEFINED))


def test_of_corrected_errors_only_storms_are_registered():
    assert not WANTED & EventType.SINGLE_BIT_ECC
    assert WANTED & EventType.SINGLE_BIT_ECC_STORM
