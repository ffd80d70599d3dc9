"""The hardware of a simulated node: its changing state, the effects of faults, and the state file."""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, FI_GET_GPU_RECOVERY_ACTION, EventType, Return
from gpu_plugin.nvml.port import NVML_FUNCTIONS
from gpu_plugin.simulation.event_sets import EventSets
from gpu_plugin.simulation.gpu import GpuState, SimulatedGpu
from gpu_plugin.simulation.mig import capability_nodes
from gpu_plugin.simulation.profile import GpuProfile, Profile
from gpu_plugin.simulation.saved import SavedNode, SimulatedComputeModes, read, write

STATE_FILE = "simulated-node.json"


class _Refusal(msgspec.Struct):
    """A driver call that fails with `code` for `left` more times: about one GPU, or (None) about any or no GPU."""

    call: str
    code: int
    gpu: int | None
    left: float


class SimulatedNode:
    """The GPUs of one node, safe from any thread.

    `state` is the directory with the state file: faults, boot id and energy counters survive a restart of the daemon, as with
    real hardware. With None nothing is saved, and without `keep` the directory is only read. `clock` (seconds, monotonic)
    measures hangs; `wall_clock` (seconds since the epoch) is for hangs and energy counters in the state file. GPUs are named
    by index. `device_root` is the directory with its device nodes; None if none were made.
    """

    def __init__(
        self,
        profile: Profile,
        state: Path | None = None,
        *,
        keep: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.profile = profile
        self.device_root: Path | None = None
        self._file = state / STATE_FILE if state and keep else None
        self._clock = clock
        self._wall_clock = wall_clock
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        self.events = EventSets()
        self._sessions = 0
        self.refusals: list[_Refusal] = []
        self._mig_numbers = count(1)
        saved = read(state / STATE_FILE, profile, keep=keep) if state else None
        now, wall = clock(), wall_clock()
        if saved:
            self.boot_id = saved.boot_id
            states = [
                replace(was, hung_until=None if was.hung_until is None else now + was.hung_until - wall)
                for was in saved.gpus
            ]
        else:
            self.boot_id = _new_boot_id()
            # The driver has been loaded for a day when a node is new.
            states = [GpuState(energy_since=wall - 86400.0, mig=_partition_of(gpu)) for gpu in profile.gpus]
        self.gpus = [
            SimulatedGpu(index, built, remotes, present)
            for index, (built, remotes, present) in enumerate(zip(profile.gpus, profile.remotes, states, strict=True))
        ]
        for gpu in self.gpus:
            gpu.partition(gpu.state.mig, self._mig_numbers)
        if not saved:
            self._save()
        self.compute_modes = SimulatedComputeModes(state, self.boot_id)
        self.events.lose(self._lost())
        if profile.init_error is not None:
            self.refuse("open", profile.init_error)

    # For the driver

    def opened(self) -> None:
        """Record that a process has opened the driver. The first opening initialises GPUs that nothing kept initialised."""
        with self._changed:
            self._sessions += 1
            states = [gpu.state for gpu in self.gpus]
            asleep = [now for now in states if not (now.persistence or now.lost or now.vanished)]
            if self._sessions > 1 or not asleep:
                return
        with self._changing():
            for now in asleep:
                now.initialise(self._wall_clock())

    def closed(self) -> None:
        """Record that a process has closed the driver."""
        with self._changed:
            self._sessions -= 1

    def on_the_bus(self) -> dict[int, int]:
        """Return the GPUs that a driver finds when it is opened, including lost GPUs, and how often each has vanished."""
        with self._changed:
            return {gpu.index: gpu.departures for gpu in self.gpus if not gpu.state.vanished}

    def failing(self, gpu: int, departures: int | None = None) -> int | None:
        """Return the code with which all calls about the GPU fail; None: it works. Blocks while the GPU hangs or is slow.

        `departures` is the number when the caller found the GPU: if it has vanished since, it is lost for this caller.
        """
        found = self.gpus[gpu]
        with self._changed:
            began = self._clock()
            while True:
                now = found.state
                left = max(now.hung_until or 0.0, began + (now.slow or 0.0)) - self._clock()
                if left <= 0:
                    break
                self._changed.wait(left)
            gone = departures not in (None, found.departures)
            return Return.GPU_IS_LOST if now.lost or now.vanished or gone else now.error

    def condition(self, gpu: int) -> GpuState:
        """Return a copy of the present state of the GPU."""
        with self._changed:
            return copy.copy(self.gpus[gpu].state)

    def energy(self, gpu: int) -> int:
        """Return the energy in mJ since the GPU was last reset or the node was new."""
        with self._changed:
            return self.gpus[gpu].energy(self._wall_clock())

    def bindings(self) -> dict[str, int]:
        """Return a number by PCI bus id that changes when the driver is bound again. Vanished GPUs are not included."""
        with self._changed:
            return {gpu.built.pci_bus_id: gpu.state.binding for gpu in self.gpus if not gpu.state.vanished}

    def device_nodes(self) -> frozenset[str]:
        """Return all paths under /dev: the profile's, and the capabilities of the present MIG devices."""
        nodes = self.profile.device_nodes
        for gpu in self.gpus:
            nodes |= capability_nodes(gpu.built.minor, [each.instance for each in gpu.mig_devices or ()])
        return nodes

    def refusal(self, call: str, gpu: int | None) -> int | None:
        """Return the code with which this call must fail, and count it; None: it does not fail."""
        with self._changed:
            for refusal in self.refusals:
                if refusal.call == call and refusal.gpu in (None, gpu):
                    refusal.left -= 1
                    if not refusal.left:
                        self.refusals.remove(refusal)
                    return refusal.code
        return None

    # Faults

    def refuse(self, call: str, code: int, gpu: int | None = None, times: float = math.inf) -> None:
        """Make a driver call, by its name in the port, fail with `code` for this number of times.

        `gpu` limits this to calls about one GPU; None: all calls, with or without a GPU. Refusals come before other errors.
        """
        if call not in NVML_FUNCTIONS:
            raise ValueError(f"{call}: no such driver call")
        with self._changed:
            self.refusals.append(_Refusal(call, code, gpu, times))

    def post(
        self,
        gpu: int,
        kind: int,
        data: int = 0,
        gpu_instance: int = ALL_INSTANCES,
        compute_instance: int = ALL_INSTANCES,
    ) -> int:
        """Add an event to each event set that is registered for this kind and GPU. Return the number of these sets.

        A GPU sends only kinds that its profile has, and none while it has vanished.
        """
        if not (kind & (self.profile.gpus[gpu].event_types or 0)) or self.condition(gpu).vanished:
            return 0
        return self.events.post(gpu, kind, data, gpu_instance, compute_instance)

    def raise_xid(
        self,
        gpu: int,
        xid: int,
        recovery_action: int = 0,
        *,
        gpu_instance: int = ALL_INSTANCES,
        compute_instance: int = ALL_INSTANCES,
    ) -> int:
        """Post an Xid, and request a recovery action if there is no request yet. Return the number of event sets that got it.

        There is no request if the GPU does not report a recovery action, or if a fault has set it to none.
        """
        field = FI_GET_GPU_RECOVERY_ACTION
        with self.changing(gpu) as now:
            asks = recovery_action and field not in now.fields and field in self.profile.gpus[gpu].fields
            if asks:
                now.fields = {**now.fields, field: recovery_action}
            receivers = self.post(gpu, EventType.XID_CRITICAL, xid, gpu_instance, compute_instance)
            if asks:
                self.post(gpu, EventType.GPU_RECOVERY_ACTION)
        return receivers

    @contextmanager
    def changing(self, gpu: int) -> Iterator[GpuState]:
        """Yield the GPU's state for changes, which last until they are changed again, cleared by a reset, or healed."""
        with self._changing():
            yield self.gpus[gpu].state

    def change(self, gpu: int, **changes: Any) -> None:
        """Change these parts of the GPU's state."""
        with self.changing(gpu) as now:
            for name, value in changes.items():
                setattr(now, name, value)

    def lose(self, gpu: int) -> None:
        """Remove the GPU from the bus without an Xid; an Xid is a separate fault."""
        self.change(gpu, lost=True)

    def hang(self, gpu: int, seconds: float) -> None:
        """Make all calls about the GPU block for this many seconds from now."""
        self.change(gpu, hung_until=self._clock() + seconds)

    def vanish(self, gpu: int) -> None:
        """Unbind the driver from the GPU: open drivers lose it, and drivers that are opened later do not find it."""
        with self.changing(gpu) as now:
            if not now.vanished:
                self.gpus[gpu].departures += 1
                self.events.vanish(gpu)
                now.vanished = True

    def bring_back(self, gpu: int) -> None:
        """Bind the driver to a vanished GPU. Processes find it when they open the driver again."""
        with self.changing(gpu) as now:
            now.bring_back(self._wall_clock())
            self.gpus[gpu].energy_dip = 0

    def reset(self, gpu: int, *, energy: bool = True) -> None:
        """Reset the GPU, including its `energy` counter if requested.

        Unlike a real GPU it keeps its partition, as if its owner had partitioned it again.
        """
        with self.changing(gpu) as now:
            now.reset(self._wall_clock(), energy=energy)
            self.gpus[gpu].energy_dip = 0

    def reboot(self) -> None:
        """Boot the node again: all GPUs are reset, and return to the bus."""
        with self._changing():
            self.boot_id = _new_boot_id()
            self.compute_modes = SimulatedComputeModes(self._file.parent if self._file else None, self.boot_id)
            for gpu in self.gpus:
                gpu.state.boot(self._wall_clock())

    def heal(self, gpu: int) -> None:
        """Repair and reset the GPU: bound again, idle, without faults, counters at 0. It keeps its partition."""
        with self.changing(gpu) as was:
            self.gpus[gpu].state = GpuState(energy_since=self._wall_clock(), binding=was.binding + 1, mig=was.mig)
            self.gpus[gpu].energy_dip = 0

    def partition(self, gpu: int, profiles: Sequence[str] | None) -> None:
        """Replace the GPU's MIG devices by these; None ends MIG mode.

        Raises:
            ConfigError: its model cannot be partitioned in this way. Nothing was changed.
        """
        built = self.profile.gpus[gpu]
        if built.mig_mode is None or built.mig_profiles is None:
            raise ConfigError(f"{built.name}: the simulated node knows of no MIG profiles for it")
        with self._changing():
            self.gpus[gpu].partition(profiles, self._mig_numbers)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Guard changes of GPUs; afterwards notify the waiting threads, and write the state file."""
        with self._changed:
            yield
            self._changed.notify_all()
            self.events.lose(self._lost())
        self._save()

    def _lost(self) -> frozenset[int]:
        return frozenset(gpu.index for gpu in self.gpus if gpu.state.lost)

    # State file

    def keep(self) -> None:
        """Write the state file again if it was removed, since real hardware does not lose its state."""
        if self._file and not self._file.exists():
            self._save()

    def _save(self) -> None:
        """Write the state file to disk, so that acknowledged faults are saved."""
        if not self._file:
            return
        with self._saving:
            with self._changed:
                now, wall = self._clock(), self._wall_clock()
                gpus = [
                    replace(gpu.state, hung_until=wall + until - now if until and until > now else None)
                    for gpu in self.gpus
                    for until in (gpu.state.hung_until,)
                ]
                saved = SavedNode(profile=self.profile.name, boot_id=self.boot_id, gpus=gpus)
            write(self._file, saved)


def _partition_of(gpu: GpuProfile) -> tuple[str, ...] | None:
    """Return the GPU's partition according to its profile; None outside MIG mode."""
    return gpu.mig or () if gpu.mig_mode is not None and gpu.mig_mode[0] else None


def _new_boot_id() -> str:
    import uuid  # noqa: PLC0415 - 7 ms, and only needed for a node's first boot

    return str(uuid.uuid4())
