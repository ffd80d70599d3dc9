"""A driver for simulated hardware that behaves like NVML, including return codes, event masks and blocking calls."""

from gpu_plugin.devices.nvml_h import (
    EVENT_TYPES_ALL,
    FI_NVLINK_GET_STATE,
    FI_REMAPPED_COR,
    FI_REMAPPED_FAILURE,
    FI_REMAPPED_PENDING,
    FI_REMAPPED_UNC,
    FI_TOTAL_ENERGY_CONSUMPTION,
    ComputeMode,
    Return,
    Threshold,
)
from gpu_plugin.nvml.port import Event, EventSet, Field, Handle, MigAttributes, NvmlError, RemappedRows
from gpu_plugin.simulation import condition
from gpu_plugin.simulation.event_sets import GpuIsLostError
from gpu_plugin.simulation.mig import COMPUTE_SLICES
from gpu_plugin.simulation.profile import GpuProfile
from gpu_plugin.simulation.session import (
    Session,
    answered,
    gpu_of_mig,
    mig_handle,
    of_profile,
    present,
    refused,
    supported,
)

_OF_ROWS = (FI_REMAPPED_PENDING, FI_REMAPPED_FAILURE, FI_REMAPPED_COR, FI_REMAPPED_UNC)

_THRESHOLDS = {
    Threshold.SHUTDOWN: "shutdown",
    Threshold.SLOWDOWN: "slowdown",
    Threshold.MEM_MAX: "memory_max",
    Threshold.GPU_MAX: "gpu_max",
}

_COMPUTE_CAPABILITIES = {5: (7, 0), 6: (7, 5), 7: (8, 0), 8: (8, 9), 9: (9, 0), 10: (10, 0)}
"""By nvmlDeviceArchitecture_t: V100, T4, A100, L40S, H100, B200 (developer.nvidia.com/cuda-gpus)."""


def _compute_capability(built: GpuProfile) -> tuple[int, int] | None:
    """Return the profile's value, else the value of its architecture's first GPU for data centers."""
    return built.compute_capability or _COMPUTE_CAPABILITIES.get(built.architecture or 0)


class SimulatedDriver(Session):
    """Implements the port's `Driver` for a `SimulatedNode`, safe from any thread. All refusals are NvmlError.

    Values that a GPU's profile lacks are NOT_SUPPORTED. `Session` describes errors, counts and delays of all calls.
    """

    # Values from a GPU's profile (`built`) and its present state (`now`). None is raised as NOT_SUPPORTED.
    minor_number = of_profile("minor_number", "minor")
    pci_bus_id = of_profile("pci_bus_id", "pci_bus_id")
    architecture = of_profile("architecture", "architecture")
    compute_capability = answered("compute_capability", lambda built, _: _compute_capability(built))
    memory_total = of_profile("memory_total", "memory_bytes")
    memory_used = answered("memory_used", lambda built, now: None if built.memory_bytes is None else now.memory_used)
    power_usage = answered("power_usage", condition.power)
    power_limit = answered("power_limit", lambda built, _: condition.power_limit(built))
    memory_affinity = answered(
        "memory_affinity",
        lambda built, _: None if built.memory_affinity is None else frozenset(built.memory_affinity),
    )
    persistence_mode = present("persistence_mode", "persistence")
    temperature = answered("temperature", condition.temperature)
    margin_temperature = answered("margin_temperature", condition.margin)
    uncorrected_ecc_errors = present("uncorrected_ecc_errors", "ecc_uncorrected", only_if="ecc")
    sram_threshold_exceeded = present("sram_threshold_exceeded", "sram_threshold", only_if="sram_status")
    retired_pages_pending = present("retired_pages_pending", "retirement_pending", only_if="page_retirement")
    unrepairable_memory = present("unrepairable_memory", "unrepairable_memory", only_if="unrepairable_memory")
    clocks_event_reasons = answered("clocks_event_reasons", condition.clocks_event_reasons)
    fabric = answered("fabric", condition.fabric)
    pcie_link = answered("pcie_link", condition.pcie_link)
    pcie_generation = answered("pcie_generation", lambda built, _: condition.pcie_generation(built))
    pcie_max_generation = answered("pcie_max_generation", lambda built, _: condition.pcie_generation(built))
    pcie_replays = present("pcie_replays", "pcie_replays", only_if="pcie_width")
    vgpu_licensed = of_profile("vgpu_licensed", "vgpu_licensed")
    supported_event_types = of_profile("supported_event_types", "event_types")

    def driver_version(self) -> str:
        self._begin("driver_version")
        return self._profile.driver_version

    def cuda_version(self) -> tuple[int, int]:
        self._begin("cuda_version")
        return self._profile.cuda_version

    def device_count(self) -> int:
        """Return the number of GPUs, including lost GPUs and GPUs that have vanished since."""
        self._begin("device_count")
        return len(self._gpus)

    def handle_by_index(self, index: int) -> Handle:
        """INVALID_ARGUMENT for an index that no GPU has."""
        gpu = self._gpus[index] if 0 <= index < len(self._gpus) else None
        self._begin("handle_by_index", gpu)
        if gpu is None:
            raise refused("handle_by_index", Return.INVALID_ARGUMENT)
        return self._handle("handle_by_index", gpu)

    def handle_by_uuid(self, uuid: str) -> Handle:
        """NOT_FOUND for a uuid that no GPU has."""
        gpus = (index for index, gpu in enumerate(self._profile.gpus) if gpu.uuid == uuid)
        return self._look_up("handle_by_uuid", next(gpus, None))

    def handle_by_pci_bus_id(self, bus_id: str) -> Handle:
        """NOT_FOUND for a bus id that no GPU has. As in NVML, its case is ignored, and the domain may have four digits."""
        return self._look_up("handle_by_pci_bus_id", self._profile.at(bus_id))

    def uuid(self, handle: Handle) -> str:
        found = self._mig_device("uuid", handle)
        return found.uuid if found else self._gpu("uuid", handle).uuid

    def name(self, handle: Handle) -> str:
        found = self._mig_device("name", handle)
        if found is None:
            return self._gpu("name", handle).name
        return f"{self._profile.gpus[gpu_of_mig(handle)].name} MIG {found.instance.profile}"

    def utilization(self, handle: Handle) -> int:
        """Return the present percentage. NOT_SUPPORTED in MIG mode."""
        index = self._reach("utilization", handle)
        busy = self._node.condition(index).utilization
        return supported("utilization", busy if self._node.mig_devices(index) is None else None)

    def mig_mode(self, handle: Handle) -> tuple[int, int]:
        """Return the profile's (current, pending), until the GPU is repartitioned."""
        index = self._reach("mig_mode", handle)
        built = supported("mig_mode", self._profile.gpus[index].mig_mode)
        enabled = int(self._node.mig_devices(index) is not None)
        return built if built[0] == enabled else (enabled, enabled)

    def max_mig_devices(self, handle: Handle) -> int:
        """Return 0 outside MIG mode and for models without MIG, for which NVML returns no error here."""
        index = self._reach("max_mig_devices", handle)
        return 0 if self._node.mig_devices(index) is None else COMPUTE_SLICES

    def mig_handle(self, handle: Handle, index: int) -> Handle:
        """NOT_SUPPORTED outside MIG mode. NOT_FOUND for an index without a device, INVALID_ARGUMENT for a higher index."""
        gpu = self._reach("mig_handle", handle)
        devices = supported("mig_handle", self._node.mig_devices(gpu))
        if not 0 <= index < COMPUTE_SLICES:
            raise refused("mig_handle", Return.INVALID_ARGUMENT)
        if index >= len(devices):
            raise refused("mig_handle", Return.NOT_FOUND)
        return mig_handle(gpu, devices[index].number)

    def gpu_instance_id(self, handle: Handle) -> int:
        """NOT_SUPPORTED for the handle of a whole GPU."""
        return self._mig("gpu_instance_id", handle).instance.gpu_instance

    def compute_instance_id(self, handle: Handle) -> int:
        """NOT_SUPPORTED for the handle of a whole GPU."""
        return self._mig("compute_instance_id", handle).instance.compute_instance

    def mig_attributes(self, handle: Handle) -> MigAttributes:
        """NOT_SUPPORTED for the handle of a whole GPU."""
        found = self._mig("mig_attributes", handle).instance
        return MigAttributes(found.gpu_instance_slices, found.compute_slices, found.memory_mb, found.engines)

    def compute_mode(self, handle: Handle) -> int:
        return self._node.compute_modes.get(self._reach("compute_mode", handle))

    def set_compute_mode(self, handle: Handle, mode: int) -> None:
        """INVALID_ARGUMENT for a mode that NVML does not have."""
        index = self._reach("set_compute_mode", handle)
        if mode not in set(ComputeMode):
            raise refused("set_compute_mode", Return.INVALID_ARGUMENT)
        self._node.compute_modes.set(index, mode)

    def temperature_threshold(self, handle: Handle, kind: Threshold) -> int:
        """Return the profile's threshold in °C. INVALID_ARGUMENT for a kind that NVML does not have."""
        thresholds = self._gpu("temperature_threshold", handle).thresholds
        if kind not in _THRESHOLDS:
            raise refused("temperature_threshold", Return.INVALID_ARGUMENT)
        limit: int | None = getattr(thresholds, _THRESHOLDS[kind])
        return supported("temperature_threshold", limit)

    def remapped_rows(self, handle: Handle) -> RemappedRows:
        """NOT_SUPPORTED also while the GPU is partitioned into MIG devices."""
        index = self._reach("remapped_rows", handle)
        rows = condition.remapped_rows(self._profile.gpus[index], self._node.condition(index))
        return supported("remapped_rows", None if self._node.mig_devices(index) else rows)

    def nvlink_states(self, handle: Handle) -> tuple[bool, ...]:
        """Return the state of each link. A link that leads nowhere is inactive."""
        index = self._reach("nvlink_states", handle)
        if not self._profile.remotes[index]:
            raise refused("nvlink_states", Return.NOT_SUPPORTED)
        return tuple(remote is not None for remote in self._remotes(index))

    def nvlink_to_switch(self, handle: Handle, link: int) -> bool:
        """Return False for an inactive link, whose far end NVML does not report."""
        remote = self._remote("nvlink_to_switch", handle, link)
        return remote is not None and all(remote != gpu.pci_bus_id for gpu in self._profile.gpus)

    def total_energy(self, handle: Handle) -> int:
        """Return the energy in mJ, which grows with time and begins at 0 after a reset."""
        return self._node.energy(self._reach("total_energy", handle))

    def field_values(self, handle: Handle, fields: tuple[Field, ...]) -> tuple[int | NvmlError, ...]:
        """NOT_SUPPORTED for a field that the profile does not list, INVALID_ARGUMENT for a link that does not exist."""
        index = self._reach("field_values", handle)
        return tuple(self._field(index, field) for field in fields)

    def nvlink_remote_bus_id(self, handle: Handle, link: int) -> str | None:
        """Return a GPU's or an NVSwitch's bus id; None for a link that leads nowhere or is down."""
        return self._remote("nvlink_remote_bus_id", handle, link)

    def common_ancestor(self, one: Handle, other: Handle) -> int:
        """Return the profile's level if both GPUs answer. UNKNOWN if the place of one of them cannot be read."""
        low = self._reach("common_ancestor", one)
        high = self._answering("common_ancestor", other)
        if any(self._node.condition(index).topology for index in (low, high)):
            raise refused("common_ancestor", Return.UNKNOWN)
        return self._profile.ancestor(low, high)

    def event_set(self) -> EventSet:
        """Make an event set without GPUs."""
        self._begin("event_set")
        return self._node.events.create()

    def free_event_set(self, events: EventSet) -> None:
        """INVALID_ARGUMENT for a set that is freed already. A `wait` for the set ends with the same error."""
        self._begin("free_event_set")
        if not self._node.events.free(events):
            raise refused("free_event_set", Return.INVALID_ARGUMENT)

    def register_events(self, handle: Handle, mask: int, events: EventSet) -> None:
        """Add to the registrations. INVALID_ARGUMENT for bits that NVML lacks, NOT_SUPPORTED for bits that the GPU lacks.

        After UNKNOWN, due to the GPU or to an injected refusal, the set returns no more events.
        """
        try:
            index = self._reach("register_events", handle)
        except NvmlError as error:
            if error.code == Return.UNKNOWN:
                self._node.events.undefine(events)
            raise
        known = supported("register_events", self._profile.gpus[index].event_types)
        if mask & ~EVENT_TYPES_ALL:
            raise refused("register_events", Return.INVALID_ARGUMENT)
        if mask & ~known:
            raise refused("register_events", Return.NOT_SUPPORTED)
        if not self._node.events.register(index, handle, mask, events):
            raise refused("register_events", Return.INVALID_ARGUMENT)

    def wait(self, events: EventSet, timeout_ms: int) -> Event:
        """Return and remove the oldest event. GPU_IS_LOST if a GPU of the set is lost. A hung GPU has no effect."""
        self._begin("wait")
        try:
            event = self._node.events.next_event(events, timeout_ms / 1000)
        except GpuIsLostError:
            raise refused("wait", Return.GPU_IS_LOST) from None
        except LookupError:
            raise refused("wait", Return.INVALID_ARGUMENT if self._opened else Return.UNINITIALIZED) from None
        if not event:
            raise refused("wait", Return.TIMEOUT)
        return event

    def _field(self, index: int, field: Field) -> int | NvmlError:
        built, now = self._profile.gpus[index], self._node.condition(index)
        value: int | None
        if field.number in condition.LINK_FIELDS:
            links = self._remotes(index)
            if not 0 <= field.scope < len(links):
                return refused("field_values", Return.INVALID_ARGUMENT if links else Return.NOT_SUPPORTED)
            value = condition.link_value(built, now, field.number, field.scope)
            if value is not None and field.number == FI_NVLINK_GET_STATE:
                value = int(links[field.scope] is not None)
        elif field.number == FI_TOTAL_ENERGY_CONSUMPTION and field.number in built.fields:
            value = self._node.energy(index)
        elif field.number in _OF_ROWS and self._node.mig_devices(index):
            value = None
        else:
            value = condition.field_value(built, now, field.number)
        return refused("field_values", Return.NOT_SUPPORTED) if value is None else value

    def _remotes(self, index: int) -> tuple[str | None, ...]:
        """Return the far end of each of a GPU's links; None for an inactive link."""
        links, down = self._profile.remotes[index], self._node.condition(index).links_down
        return tuple(None if link in down else remote for link, remote in enumerate(links)) if down else links

    def _remote(self, call: str, handle: Handle, link: int) -> str | None:
        links = self._remotes(self._reach(call, handle))
        if not links:
            raise refused(call, Return.NOT_SUPPORTED)
        if not 0 <= link < len(links):
            raise refused(call, Return.INVALID_ARGUMENT)
        return links[link]
