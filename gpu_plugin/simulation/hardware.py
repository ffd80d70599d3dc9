"""The hardware of a simulated node: what changes while it runs, what a fault does to it, and what outlives the daemon."""

import collections
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.nvml.port import Driver, EventSet
from gpu_plugin.simulation.compute_modes import SimulatedComputeModes
from gpu_plugin.simulation.mig import MigInstance, capability_nodes, lay_out
from gpu_plugin.simulation.profile import GpuProfile, Profile, mig_uuid
from gpu_plugin.simulation.saved import SavedGpu, SavedNode, read, write

STATE_FILE = "simulated-node.json"

_QUEUE_LENGTH = 1024
"""Events an event set holds while nobody waits; the oldest go first. A bound of our own: NVML documents none."""

_LOADED_BEFORE = 86400.0
"""Seconds that the driver has been loaded when a node is first seen: its energy counters have a day behind them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG device of a GPU. No other ever has the `number`; the same instance made again has the same `uuid`."""

    number: int
    uuid: str
    instance: MigInstance


@dataclass(frozen=True, slots=True)
class Cut:
    """How a GPU in MIG mode is cut: the profiles asked for, and the MIG devices by MIG index."""

    profiles: tuple[str, ...] = ()
    slices: tuple[Slice, ...] = ()


@dataclass(slots=True)
class _Gpu:
    """What changes about one GPU. `hung_until` is on the node's clock, `energy_since` on its wall clock; both seconds.

    `cut` is None out of MIG mode.
    """

    temperature: int
    energy_since: float
    lost: bool = False
    hung_until: float = 0.0
    cut: Cut | None = None


@dataclass(slots=True)
class _Listener:
    """An event set: the mask of each GPU registered in it, and the events (gpu, kind, data) nobody has fetched yet."""

    masks: dict[int, int] = field(default_factory=dict)
    events: collections.deque[tuple[int, int, int]] = field(
        default_factory=lambda: collections.deque(maxlen=_QUEUE_LENGTH)
    )


@dataclass(slots=True)
class _Refusal:
    call: str
    code: int
    gpu: int | None
    left: int | None


class SimulatedNode:
    """The GPUs of one node, safe from any thread.

    `state` is the directory that remembers faults, boot id and energy counters, because hardware does not heal when a
    daemon restarts; None remembers nothing. `clock` (seconds, never goes back) times hangs; `wall_clock` (seconds since
    the epoch) carries them and the energy counters over restarts. A GPU is named by its index everywhere. `device_root` is the
    directory under which its device nodes were made, None where they were not.
    """

    def __init__(
        self,
        profile: Profile,
        state: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.profile = profile
        self.device_root: Path | None = None
        self._file = state / STATE_FILE if state else None
        self._clock = clock
        self._wall_clock = wall_clock
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        self._listeners: dict[EventSet, _Listener] = {}
        self._last_listener = 0
        self._refusals: list[_Refusal] = []
        self._last_slice = 0
        saved = read(self._file, profile) if self._file else None
        now, wall = clock(), wall_clock()
        if saved:
            self.boot_id = saved.boot_id
            self._gpus = [
                _Gpu(
                    temperature=gpu.idle_temperature if was.temperature is None else was.temperature,
                    energy_since=was.energy_since,
                    lost=was.lost,
                    hung_until=0.0 if was.hung_until is None else now + was.hung_until - wall,
                    cut=self._cut(gpu, _built(gpu) if was.mig is msgspec.UNSET else was.mig),
                )
                for gpu, was in zip(profile.gpus, saved.gpus, strict=True)
            ]
        else:
            self.boot_id = _new_boot_id()
            self._gpus = [
                _Gpu(gpu.idle_temperature, wall - _LOADED_BEFORE, cut=self._cut(gpu, _built(gpu)))
                for gpu in profile.gpus
            ]
            self._save()

        self.compute_modes = SimulatedComputeModes(state, self.boot_id)

    # What a driver sees

    def is_lost(self, gpu: int) -> bool:
        """Whether the GPU has fallen off the bus. Blocks for as long as the GPU hangs, as any call to it does."""
        with self._changed:
            while (left := self._gpus[gpu].hung_until - self._clock()) > 0:
                self._changed.wait(left)
            return self._gpus[gpu].lost

    def temperature(self, gpu: int) -> int:
        """°C."""
        with self._changed:
            return self._gpus[gpu].temperature

    def energy(self, gpu: int) -> int:
        """Energy in mJ drawn since the GPU was last reset or the node first seen."""
        with self._changed:
            seconds = max(0.0, self._wall_clock() - self._gpus[gpu].energy_since)
        return int(seconds * self.profile.gpus[gpu].idle_watts * 1000)

    def cut(self, gpu: int) -> Cut | None:
        """How the GPU is cut into MIG devices; None out of MIG mode."""
        with self._changed:
            return self._gpus[gpu].cut

    def device_nodes(self) -> frozenset[str]:
        """Every path under /dev: the profile's, and the capabilities of the MIG devices that there are."""
        nodes = self.profile.device_nodes
        for gpu, built in enumerate(self.profile.gpus):
            if cut := self.cut(gpu):
                nodes |= capability_nodes(built.minor, [each.instance for each in cut.slices])
        return nodes

    def refusal(self, call: str, gpu: int | None) -> int | None:
        """The code with which `refuse` wants this call to fail, using up one of its times; None lets it pass."""
        with self._changed:
            for refusal in self._refusals:
                if refusal.call == call and refusal.gpu in (None, gpu):
                    if refusal.left is not None:
                        refusal.left -= 1
                        if not refusal.left:
                            self._refusals.remove(refusal)
                    return refusal.code
        return None

    # Events

    def open_listener(self) -> EventSet:
        """A new event set, in which no GPU is registered."""
        with self._changed:
            self._last_listener += 1
            events = EventSet(self._last_listener)
            self._listeners[events] = _Listener()
        return events

    def close_listener(self, events: EventSet) -> bool:
        """Forgets an event set and ends the waits for it; False where there is none."""
        with self._changed:
            known = self._listeners.pop(events, None) is not None
            self._changed.notify_all()
        return known

    def close_listeners(self) -> None:
        """Forgets every event set."""
        with self._changed:
            self._listeners.clear()
            self._changed.notify_all()

    def listen(self, gpu: int, mask: int, events: EventSet) -> bool:
        """Adds these kinds of a GPU's events to an event set, from now on; False where there is no such set."""
        with self._changed:
            if not (listener := self._listeners.get(events)):
                return False
            listener.masks[gpu] = listener.masks.get(gpu, 0) | mask
        return True

    def next_event(self, events: EventSet, seconds: float) -> tuple[int, int, int] | None:
        """The oldest event not fetched yet as (gpu, kind, data), waiting for one; None when none came in time.

        Raises:
            LookupError: there is no such event set, or no longer.
        """

        def ready() -> bool:
            listener = self._listeners.get(events)
            return not listener or bool(listener.events)

        with self._changed:
            self._changed.wait_for(ready, seconds)
            if not (listener := self._listeners.get(events)):
                raise LookupError(events)
            return listener.events.popleft() if listener.events else None

    # Faults

    def post(self, gpu: int, kind: int, data: int) -> int:
        """Queues an event in every event set that asked for that kind from that GPU; gives how many did."""
        with self._changed:
            listeners = [listener for listener in self._listeners.values() if listener.masks.get(gpu, 0) & kind]
            for listener in listeners:
                listener.events.append((gpu, kind, data))
            self._changed.notify_all()
        return len(listeners)

    def set_temperature(self, gpu: int, celsius: int) -> None:
        """The GPU stays at this temperature until told otherwise or healed."""
        with self._changed:
            self._gpus[gpu].temperature = celsius
        self._save()

    def lose(self, gpu: int) -> None:
        """The GPU falls off the bus, silently: an Xid that a real one may raise is a fault of its own."""
        with self._changed:
            self._gpus[gpu].lost = True
        self._save()

    def hang(self, gpu: int, seconds: float) -> None:
        """Every call to the GPU blocks for so long from now."""
        with self._changed:
            self._gpus[gpu].hung_until = self._clock() + seconds
            self._changed.notify_all()
        self._save()

    def partition(self, gpu: int, profiles: Sequence[str] | None) -> None:
        """Cuts the GPU into these MIG devices, in place of what it was cut into; None takes it out of MIG mode.

        Raises:
            ConfigError: its model cannot be cut so; nothing was done.
        """
        built = self.profile.gpus[gpu]
        if built.mig_mode is None or built.mig_profiles is None:
            raise ConfigError(f"{built.name}: the simulated node knows of no MIG profiles for it")
        with self._changed:
            self._gpus[gpu].cut = self._cut(built, profiles)
        self._save()

    def heal(self, gpu: int) -> None:
        """Repair and reset in one: answers again, idle temperature, energy counter at 0 as after a driver reload.

        It stays cut as it was, unlike a real one, which keeps the mode alone: its owner is taken to have cut it again.
        """
        with self._changed:
            idle = self.profile.gpus[gpu].idle_temperature
            self._gpus[gpu] = _Gpu(idle, self._wall_clock(), cut=self._gpus[gpu].cut)
            self._changed.notify_all()
        self._save()

    def refuse(self, call: str, code: int, gpu: int | None = None, times: int | None = None) -> None:
        """A seam for tests: makes a driver call, by its name in the port, fail with `code`.

        Of one GPU or, for None, of any and of calls that are no GPU's; `times` times or, for None, for ever. It comes
        before whatever else would happen to the call.
        """
        if not hasattr(Driver, call):
            raise ValueError(f"{call}: no such driver call")
        with self._changed:
            self._refusals.append(_Refusal(call, code, gpu, times))

    def _cut(self, gpu: GpuProfile, profiles: Sequence[str] | None) -> Cut | None:
        if profiles is None:
            return None
        slices = []
        for instance in lay_out(gpu.mig_profiles, profiles) if gpu.mig_profiles else ():
            self._last_slice += 1
            slices.append(Slice(self._last_slice, mig_uuid(gpu.uuid, instance), instance))
        return Cut(tuple(profiles), tuple(slices))

    # Memory

    def _save(self) -> None:
        """Writes the state file, which is on disk before a fault is acknowledged."""
        if not self._file:
            return
        with self._saving:
            write(self._file, self._snapshot())

    def _snapshot(self) -> SavedNode:
        with self._changed:
            now, wall = self._clock(), self._wall_clock()
            return SavedNode(
                profile=self.profile.name,
                boot_id=self.boot_id,
                gpus=[
                    SavedGpu(
                        energy_since=gpu.energy_since,
                        temperature=None if gpu.temperature == built.idle_temperature else gpu.temperature,
                        lost=gpu.lost,
                        hung_until=wall + gpu.hung_until - now if gpu.hung_until > now else None,
                        mig=list(gpu.cut.profiles) if gpu.cut else None,
                    )
                    for gpu, built in zip(self._gpus, self.profile.gpus, strict=True)
                ],
            )


def _built(gpu: GpuProfile) -> Sequence[str] | None:
    """What the GPU is cut into as it leaves the factory; None out of MIG mode."""
    return gpu.mig or () if gpu.mig_mode is not None and gpu.mig_mode[0] else None


def _new_boot_id() -> str:
    import uuid  # noqa: PLC0415 - 7 ms, and only for a node's first boot

    return str(uuid.uuid4())
