"""One GPU of a simulated node: its changing state, the effects of a reset, a boot and a return on it, and its answers."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpu_plugin.devices.nvml_h import (
    FABRIC_CONFIGURATION_SHIFT,
    FABRIC_FALSE,
    FABRIC_TRUE,
    FI_GET_GPU_RECOVERY_ACTION,
    FI_PCIE_COUNT_FATAL_ERROR,
    FabricCondition,
    FabricConfiguration,
    FabricState,
    FabricSummary,
    Return,
)
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.port import PcieLink, RemappedRows
from gpu_plugin.simulation.mig import COMPUTE_SLICES, MigInstance, lay_out
from gpu_plugin.simulation.profile import GpuProfile, mig_uuid

# By nvmlDeviceArchitecture_t: V100, T4, A100, L40S, H100, B200 (developer.nvidia.com/cuda-gpus)
_COMPUTE_CAPABILITIES = {5: (7, 0), 6: (7, 5), 7: (8, 0), 8: (8, 9), 9: (9, 0), 10: (10, 0)}

# The PCIe generation of NVIDIA's data center GPUs by nvmlDeviceArchitecture_t, from their data sheets
_PCIE_GENERATIONS = {5: 3, 6: 3, 7: 4, 8: 4, 9: 5, 10: 5}


def _completed(true: FabricCondition, summary: FabricSummary) -> Fabric:
    """Return a completed fabric in which only this condition is true, and the configuration has no fault."""
    mask = FabricConfiguration.NONE << FABRIC_CONFIGURATION_SHIFT
    for condition in set(FabricCondition) - {FabricCondition.PARTITION_ASSIGNED}:
        mask |= (FABRIC_TRUE if condition is true else FABRIC_FALSE) << condition
    return Fabric(state=FabricState.COMPLETED, health_mask=mask, summary=summary)


# States that a fault can give a fabric. In all completed states, cluster and clique are the profile's.
FABRICS: Mapping[str, Fabric] = {
    "in-progress": Fabric(state=FabricState.IN_PROGRESS),
    "unhealthy": _completed(FabricCondition.ROUTE_UNHEALTHY, FabricSummary.UNHEALTHY),
    "limited": _completed(FabricCondition.DEGRADED_BW, FabricSummary.LIMITED_CAPACITY),
}

# Values of `topology` for an unknown place on PCIe: NVML does not report it, or neither NVML nor sysfs reports it
UNREADABLE = "unreadable"
UNKNOWN = "unknown"


class GpuState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The present state of one GPU. None and defaults mean the profile's value, or the state without faults.

    Mappings are replaced by changes, never changed themselves. The names are those of the state file.
    """

    energy_since: float  # seconds of the wall clock
    binding: int = 1  # changes whenever the driver is bound again
    lost: bool = False
    vanished: bool = False
    hung_until: float | None = None  # seconds of the node's clock
    error: int | None = None  # the nvmlReturn_t of all calls about the GPU
    temperature: int | None = None  # °C
    margin: int | None = None  # °C
    fields: dict[int, int] = {}  # values by NVML_FI_* id
    link_fields: dict[int, dict[int, int]] = {}  # values of NVLinks by NVML_FI_* id, then by link
    ecc_uncorrected: int = 0  # since the last reset
    sram_threshold: bool = False
    rows_uncorrectable: int = 0
    remap_pending: bool = False
    remap_failure: bool = False
    retirement_pending: bool = False
    unrepairable_memory: bool = False
    clocks_event_reasons: int | None = None
    links_down: tuple[int, ...] = ()  # NVLinks that are inactive at this end
    fabric: str | None = None  # a key of `FABRICS`
    topology: str | None = None  # UNREADABLE or UNKNOWN
    pcie_width: int | None = None
    pcie_replays: int = 0  # since the last reset
    persistence: bool = True  # the driver keeps the GPU initialised while no process uses it
    slow: float | None = None  # duration of each call about the GPU in seconds
    watts: int | None = None
    utilization: int = 0  # percent
    memory_used: int = 0  # bytes
    mig: tuple[str, ...] | None = None  # the MIG profiles into which it is partitioned; None outside MIG mode

    def initialise(self, now: float) -> None:
        """Have the driver initialise the GPU at `now` on the wall clock, as it does if nothing kept the GPU initialised."""
        self.energy_since = now
        self.fields = _without(self.fields, FI_PCIE_COUNT_FATAL_ERROR)
        self.link_fields = {}
        self.ecc_uncorrected = self.pcie_replays = 0

    def reset(self, now: float, *, energy: bool = True) -> None:
        """Reset the GPU at `now` on the wall clock: counters are 0, pending changes are done.

        A lost or vanished GPU stays lost or vanished, and damage that only a repair fixes stays. Energy counts from the time
        when the driver was loaded (nvml.h): if the driver stays loaded during the reset, `energy` is False.
        """
        since = now if energy else self.energy_since
        self.initialise(now)
        self.energy_since = since
        self.fields = _without(self.fields, FI_GET_GPU_RECOVERY_ACTION)
        self.hung_until = self.fabric = None
        self.remap_pending = self.retirement_pending = False
        self.links_down = ()
        if self.error == Return.RESET_REQUIRED:
            self.error = None

    def boot(self, now: float) -> None:
        """Boot the node at `now` on the wall clock: the GPU is reset, on the bus, and bound again."""
        self.reset(now)
        self.lost = self.vanished = False
        self.error = None
        self.binding += 1

    def bring_back(self, now: float) -> None:
        """Return the GPU to the bus at `now` and bind the driver again, whose own counters are then 0."""
        self.energy_since = now
        self.vanished = False
        self.ecc_uncorrected = self.pcie_replays = 0
        self.binding += 1


def _without(fields: dict[int, int], number: int) -> dict[int, int]:
    return {each: value for each, value in fields.items() if each != number}


class SimulatedMigDevice(msgspec.Struct, frozen=True):
    """A MIG device of a GPU. Its `number` on the node is never reused. An instance that is made again has the same `uuid`."""

    gpu: int
    number: int
    uuid: str
    instance: MigInstance


class SimulatedGpu:
    """A GPU by its `index`: its profile (`built`), the far ends of its NVLinks, its state, and what is not saved.

    `departures` is how often it has vanished. `energy_dip` is by how many mJ the next reading of its energy is lower than the
    last. `mig_devices` are its MIG devices by MIG index; None outside MIG mode.
    """

    def __init__(self, index: int, built: GpuProfile, remotes: tuple[str | None, ...], state: GpuState) -> None:
        self.index = index
        self.built = built
        self.remotes = remotes
        self.state = state
        self.departures = 0
        self.energy_dip = 0
        self._energy_read = 0
        self.mig_devices: tuple[SimulatedMigDevice, ...] | None = None
        # The link is never idle, so its generation is the highest.
        generation = None if built.pcie_width is None else _PCIE_GENERATIONS.get(built.architecture or 0)
        self._fixed: dict[str, object] = {
            "minor_number": built.minor,
            "pci_bus_id": built.pci_bus_id,
            "architecture": built.architecture,
            "compute_capability": built.compute_capability or _COMPUTE_CAPABILITIES.get(built.architecture or 0),
            "memory_total": built.memory_bytes,
            "memory_affinity": None if built.memory_affinity is None else frozenset(built.memory_affinity),
            "power_limit": 1000 * built.limit_watts,
            "pcie_generation": generation,
            "pcie_max_generation": generation,
            "vgpu_licensed": built.vgpu_licensed,
            "supported_event_types": built.event_types,
        }

    def partition(self, profiles: Sequence[str] | None, numbers: Iterator[int]) -> None:
        """Replace the MIG devices; the new devices get the next numbers. Raises ConfigError if there is no room."""
        instances = lay_out(self.built.mig_profiles, profiles) if profiles and self.built.mig_profiles else ()
        devices = tuple(
            SimulatedMigDevice(self.index, next(numbers), mig_uuid(self.built.uuid, instance), instance)
            for instance in instances
        )
        self.mig_devices = None if profiles is None else devices
        self.state.mig = None if profiles is None else tuple(profiles)

    def energy(self, now: float) -> int:
        """Return the energy in mJ since the last reset, at `now` on the wall clock, and apply `energy_dip` to the counter."""
        watts = self.built.idle_watts
        if self.energy_dip:
            self._energy_read = max(0, self._energy_read - self.energy_dip)
            self.energy_dip = 0
            self.state.energy_since = now - self._energy_read / watts / 1000
        else:
            self._energy_read = round(max(0.0, now - self.state.energy_since) * watts * 1000)
        return self._energy_read

    def links(self) -> tuple[str | None, ...]:
        """Return the far end of each NVLink; None for an inactive link."""
        down = self.state.links_down
        if not down:
            return self.remotes
        return tuple(None if link in down else remote for link, remote in enumerate(self.remotes))

    def power(self) -> int:
        """Return the power draw in mW."""
        watts = self.state.watts
        return 1000 * (self.built.idle_watts if watts is None else watts)

    def answer(self, call: str) -> object:
        """Return the value of a driver call that returns one value of a GPU; None: its model does not support the call."""
        built, now = self.built, self.state
        match call:
            case "memory_used":
                return None if built.memory_bytes is None else now.memory_used
            case "power_usage":
                return self.power()
            case "persistence_mode":
                return now.persistence
            case "temperature":
                return self._temperature()
            case "margin_temperature":
                return self._margin()
            case "uncorrected_ecc_errors":
                return now.ecc_uncorrected if built.ecc else None
            case "sram_threshold_exceeded":
                return now.sram_threshold if built.sram_status else None
            case "retired_pages_pending":
                return now.retirement_pending if built.page_retirement else None
            case "unrepairable_memory":
                return now.unrepairable_memory if built.unrepairable_memory else None
            case "remapped_rows" if built.row_remapping and not self.mig_devices:  # not supported with MIG devices
                return RemappedRows(0, now.rows_uncorrectable, now.remap_pending, now.remap_failure)
            case "clocks_event_reasons" if built.clocks_event_reasons is not None:
                reasons = now.clocks_event_reasons
                return built.clocks_event_reasons if reasons is None else reasons
            case "fabric":
                return self._fabric()
            case "nvlink_states":
                return tuple(remote is not None for remote in self.links()) or None
            case "pcie_link" if built.pcie_width:
                return PcieLink(now.pcie_width or built.pcie_width, built.pcie_width)
            case "pcie_replays":
                return now.pcie_replays if built.pcie_width else None
            case "utilization":
                return now.utilization if self.mig_devices is None else None
            case "mig_mode":
                return self._mig_mode()
            case "max_mig_devices":  # NVML returns 0 also for models without MIG
                return 0 if self.mig_devices is None else COMPUTE_SLICES
        return self._fixed.get(call)

    def _temperature(self) -> int:
        held = self.state.temperature
        return self.built.idle_temperature if held is None else held

    def _margin(self) -> int | None:
        """Return the present margin, which falls by a degree for each degree above the idle temperature."""
        if self.built.margin is None:
            return None
        held = self.state.margin
        return self.built.margin - (self._temperature() - self.built.idle_temperature) if held is None else held

    def _fabric(self) -> Fabric | None:
        """Return the state of a fault, else of the profile. In all completed states, cluster and clique are the profile's."""
        own, name = self.built.fabric, self.state.fabric
        if own is None:
            return None
        now = own if name is None else FABRICS[name]
        place = (own.cluster, own.clique) if now.state == FabricState.COMPLETED else ("", 0)
        return Fabric(now.state, now.status, now.health_mask, now.summary, *place)

    def _mig_mode(self) -> tuple[int, int] | None:
        """Return the profile's (current, pending), until the GPU is repartitioned."""
        enabled, built = int(self.mig_devices is not None), self.built.mig_mode
        return built if built is None or built[0] == enabled else (enabled, enabled)
