"""The driver of whatever platform this node turns out to be."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.platforms.choice import AUTO, Choice, Platform, choose
from gpu_plugin.platforms.one_device import TegraDriver, WslDriver
from gpu_plugin.platforms.traces import look

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

ARM = frozenset({"aarch64", "arm64"})
"""Machines that a GPU can be part of the processor of, as the kernel calls them."""

NAMES_PATIENCE = 5.0
"""Seconds GPUs may take to say their names, all together; the first contact wakes a sleeping one, and a sick one hangs."""


def _passed_on(call: Callable[Concatenate[Driver, P], T]) -> "Callable[Concatenate[PlatformDriver, P], T]":
    """The same call, answered by the driver of the platform that was chosen."""
    name = call.__name__

    def passed_on(self: "PlatformDriver", /, *arguments: P.args, **named: P.kwargs) -> T:
        answering: Callable[P, T] = getattr(self.chosen, name)
        return answering(*arguments, **named)

    return passed_on


class PlatformDriver:
    """`port.Driver` of this node's platform, which is looked for anew at each `open`: a driver may come, or come late."""

    def __init__(
        self, nvml: Driver, roots: Sequence[str], strategy: str = AUTO, machine: str = os.uname().machine
    ) -> None:
        """Takes the driver where it is NVML's, the roots under which to look for files, and what the operator asks for.

        `machine` is the kernel's name for the kind of processor.
        """
        self.chosen = nvml
        self._nvml = nvml
        self._drivers: dict[Platform, Driver] = {
            Platform.NVML: nvml,
            Platform.WSL: WslDriver(nvml),
            Platform.TEGRA: TegraDriver(),
        }
        self._roots = tuple(dict.fromkeys(roots))
        self._strategy = strategy
        self._may_integrate = machine in ARM
        self._nvml_open = False
        self._said: Choice | None = None

    def open(self) -> None:
        """Finds out what this node is, and opens the driver for that.

        Raises:
            NvmlError: it is NVML's, or needs NVML as WSL does, and there is none that works.
        """
        self._nvml_open = False
        choice = choose(self._strategy, look(self._roots), self._models)
        if choice.platform is Platform.NVML and not self._nvml_open:
            self._nvml.open()
        elif choice.platform is not Platform.NVML and self._nvml_open:
            self._nvml.close()
        self.chosen = self._drivers[choice.platform]
        if choice != self._said:
            level = logging.DEBUG if choice.platform is Platform.NVML else logging.INFO  # NVML is what everyone expects
            log.log(level, "this node's platform is %s: %s", choice.platform, choice.reason)
        self._said = choice
        if self.chosen is not self._nvml:
            self.chosen.open()

    def _models(self) -> tuple[str, ...] | None:
        """Opens NVML, and asks it for the GPUs' names where one may be part of the processor; None: there is no library."""
        try:
            self._nvml.open()
        except NvmlError as error:
            if error.code == Return.LIBRARY_NOT_FOUND:
                return None
            raise
        self._nvml_open = True
        return self._names() if self._may_integrate else ()

    def _names(self) -> tuple[str, ...]:
        """The names of the GPUs that say theirs in time: one that hangs is no reason to find none."""
        names: dict[int, str] = {}

        def ask(index: int) -> None:
            try:
                names[index] = self._nvml.name(self._nvml.handle_by_index(index))
            except NvmlError as error:
                log.debug("GPU %d does not say its name: %s", index, error)

        try:
            count = self._nvml.device_count()
        except NvmlError:
            return ()  # whoever opens the driver asks for the count next, and hears why there is none
        asking = [threading.Thread(target=ask, args=(i,), name=f"nvml-name-{i}", daemon=True) for i in range(count)]
        until = time.monotonic() + NAMES_PATIENCE
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(max(0.0, until - time.monotonic()))
        return tuple(name for _, name in sorted(names.copy().items()))

    close = _passed_on(Driver.close)
    driver_version = _passed_on(Driver.driver_version)
    cuda_version = _passed_on(Driver.cuda_version)
    device_count = _passed_on(Driver.device_count)
    handle_by_index = _passed_on(Driver.handle_by_index)
    handle_by_uuid = _passed_on(Driver.handle_by_uuid)
    handle_by_pci_bus_id = _passed_on(Driver.handle_by_pci_bus_id)
    uuid = _passed_on(Driver.uuid)
    minor_number = _passed_on(Driver.minor_number)
    pci_bus_id = _passed_on(Driver.pci_bus_id)
    name = _passed_on(Driver.name)
    architecture = _passed_on(Driver.architecture)
    compute_capability = _passed_on(Driver.compute_capability)
    memory_total = _passed_on(Driver.memory_total)
    memory_used = _passed_on(Driver.memory_used)
    utilization = _passed_on(Driver.utilization)
    power_usage = _passed_on(Driver.power_usage)
    power_limit = _passed_on(Driver.power_limit)
    mig_mode = _passed_on(Driver.mig_mode)
    max_mig_devices = _passed_on(Driver.max_mig_devices)
    mig_handle = _passed_on(Driver.mig_handle)
    gpu_instance_id = _passed_on(Driver.gpu_instance_id)
    compute_instance_id = _passed_on(Driver.compute_instance_id)
    mig_attributes = _passed_on(Driver.mig_attributes)
    numa_node = _passed_on(Driver.numa_node)
    compute_mode = _passed_on(Driver.compute_mode)
    set_compute_mode = _passed_on(Driver.set_compute_mode)
    persistence_mode = _passed_on(Driver.persistence_mode)
    temperature = _passed_on(Driver.temperature)
    temperature_threshold = _passed_on(Driver.temperature_threshold)
    margin_temperature = _passed_on(Driver.margin_temperature)
    uncorrected_ecc_errors = _passed_on(Driver.uncorrected_ecc_errors)
    sram_threshold_exceeded = _passed_on(Driver.sram_threshold_exceeded)
    remapped_rows = _passed_on(Driver.remapped_rows)
    retired_pages_pending = _passed_on(Driver.retired_pages_pending)
    unrepairable_memory = _passed_on(Driver.unrepairable_memory)
    clocks_event_reasons = _passed_on(Driver.clocks_event_reasons)
    nvlink_states = _passed_on(Driver.nvlink_states)
    nvlink_to_switch = _passed_on(Driver.nvlink_to_switch)
    fabric = _passed_on(Driver.fabric)
    pcie_link = _passed_on(Driver.pcie_link)
    pcie_replays = _passed_on(Driver.pcie_replays)
    total_energy = _passed_on(Driver.total_energy)
    supported_event_types = _passed_on(Driver.supported_event_types)
    field_values = _passed_on(Driver.field_values)
    nvlink_remote_bus_id = _passed_on(Driver.nvlink_remote_bus_id)
    common_ancestor = _passed_on(Driver.common_ancestor)
    event_set = _passed_on(Driver.event_set)
    free_event_set = _passed_on(Driver.free_event_set)
    register_events = _passed_on(Driver.register_events)
    wait = _passed_on(Driver.wait)
