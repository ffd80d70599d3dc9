"""Asking the driver for one GPU's events, and what its answer means for the event set. What is here blocks.

nvml.h on nvmlDeviceRegisterEvents: after UNKNOWN the event set is in an undefined state and is to be freed; after
NOT_SUPPORTED it can still be used, and none of the types that were asked for is registered.
"""

from contextlib import suppress
from enum import Enum, auto

import msgspec

from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml.port import Driver, Event, EventSet, Handle, NvmlError

WANTED = (
    EventType.DOUBLE_BIT_ECC
    | EventType.XID_CRITICAL
    | EventType.MIG_CONFIG_CHANGE
    | EventType.SINGLE_BIT_ECC_STORM
    | EventType.DRAM_RETIREMENT
    | EventType.DRAM_RETIREMENT_FAILURE
    | EventType.NON_FATAL_POISON
    | EventType.FATAL_POISON
    | EventType.GPU_UNAVAILABLE
    | EventType.GPU_RECOVERY_ACTION
)

_UNDEFINED = frozenset({Return.UNKNOWN, Return.GPU_IS_LOST})
"""Refusals after which nothing is to be expected of the event set, of its other GPUs included."""


class Outcome(Enum):
    """What became of the request for a GPU's events."""

    HEARD = auto()
    """They will come."""
    UNSUPPORTED = auto()
    """None will ever come, for lack of support: nothing is wrong."""
    REFUSED = auto()
    """It is worth asking again; the event set is as it was."""
    UNDEFINED = auto()
    """It is worth asking again, for another event set: this one is to be freed."""


class Registered(msgspec.Struct, frozen=True):
    """The outcome, and `why` no events come. `event` is one that came while that was found out."""

    outcome: Outcome
    why: str = ""
    event: Event | None = None


def register(driver: Driver, handle: Handle, events: EventSet) -> Registered:
    """Asks for every health event that the GPU can report, or at least for Xids."""
    try:
        mask = int(WANTED) & driver.supported_event_types(handle)
    except NvmlError as error:
        return _refused(error, Outcome.REFUSED)  # which says nothing of the set: it was not touched
    if not mask:
        return Registered(Outcome.UNSUPPORTED, "it reports no events")
    answer = _ask(driver, handle, mask, events)
    if answer.outcome is Outcome.UNSUPPORTED and mask & EventType.XID_CRITICAL and mask != EventType.XID_CRITICAL:
        return _ask(driver, handle, int(EventType.XID_CRITICAL), events)
    return answer


def register_warily(driver: Driver, handle: Handle, events: EventSet) -> Registered:
    """As `register`, for a GPU that may have undone an event set: first it is tried in one that has no other GPU."""
    try:
        own_set = driver.event_set()
    except NvmlError as error:
        return Registered(Outcome.REFUSED, _unasked(error))
    try:
        tried = register(driver, handle, own_set)
        if tried.outcome is not Outcome.HEARD:
            # What was undone is gone with the set that it was tried in.
            outcome = Outcome.REFUSED if tried.outcome is Outcome.UNDEFINED else tried.outcome
            return Registered(outcome, tried.why)
        event = _waited(driver, own_set)
    except NvmlError as error:
        return Registered(Outcome.REFUSED, _unasked(error))
    finally:
        with suppress(NvmlError):  # one that is gone with its GPU
            driver.free_event_set(own_set)
    found = register(driver, handle, events)
    return Registered(found.outcome, found.why, event)


def _waited(driver: Driver, events: EventSet) -> Event | None:
    try:
        return driver.wait(events, 0)
    except NvmlError as error:
        if error.code == Return.TIMEOUT:
            return None
        raise


def _ask(driver: Driver, handle: Handle, mask: int, events: EventSet) -> Registered:
    try:
        driver.register_events(handle, mask, events)
    except NvmlError as error:
        return _refused(error, Outcome.UNDEFINED if error.code in _UNDEFINED else Outcome.REFUSED)
    return Registered(Outcome.HEARD)


def _refused(error: NvmlError, otherwise: Outcome) -> Registered:
    if error.unsupported:
        return Registered(Outcome.UNSUPPORTED, "it is too old to report events")
    return Registered(otherwise, _unasked(error))


def _unasked(error: NvmlError) -> str:
    return f"it could not be asked for them: {error}"
