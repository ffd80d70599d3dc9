"""The metrics of each GPU: its description, its health, and its newest readings. All series have its uuid and index."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_plugin.health.explain import Explanation
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.status.model import Counters, Gpu, Status
from gpu_plugin.status.readings import CLOCKS_EVENTS, FABRIC_STATES, RECOVERY_ACTIONS
from gpu_plugin.telemetry.metrics.exposition import Family, counter, gauge, info, labelled

STATES = ("healthy", "degraded", "unhealthy")

ORDER_SIGNALS = tuple(name for name, signal in SIGNALS.items() if signal.kind is SignalKind.ORDER)

Gpus = Sequence[tuple[str, Gpu]]  # each GPU with its labels

Read = Sequence[tuple[str, Mapping[str, Any]]]  # the readings of each GPU with its labels


def families(status: Status) -> Iterator[Family]:
    """Return the families of the GPUs, each made when it is iterated over: a full node has thousands of samples."""
    gpus = [(labelled(uuid=gpu.uuid, index=gpu.index), gpu) for gpu in status.gpus]
    labels = {gpu.uuid: text for text, gpu in gpus}
    driver = status.driver.version
    yield info(
        "gpu_plugin_gpu_info",
        "Description of a GPU.",
        [f"{of},{labelled(pci_bus_id=gpu.bus_id, model=gpu.model, driver=driver)}" for of, gpu in gpus],
    )
    yield from _health(gpus)
    yield from _history(status.counters or Counters(), labels)
    yield from _readings([(labels, gpu.readings) for labels, gpu in gpus])


def _health(gpus: Gpus) -> Iterator[Family]:
    signals = [(name, labelled(signal=name)) for name in SIGNALS]
    yield gauge(
        "gpu_plugin_gpu_health",
        "The state of each GPU (1) and the other states (0). A GPU with a bad MIG device is degraded.",
        [(f"{labels},{labelled(state=state)}", _state(gpu) == state) for labels, gpu in gpus for state in STATES],
    )
    yield gauge(
        "gpu_plugin_gpu_held_back",
        "Whether only this and other orders of operators keep a GPU from pods: it has no fault.",
        [(f"{labels},{labelled(by=order)}", order in gpu.held_back) for labels, gpu in gpus for order in ORDER_SIGNALS],
    )
    yield gauge(
        "gpu_plugin_gpu_health_since_timestamp_seconds",
        "Time since which a GPU has its worst verdict, in Unix time.",
        [(labels, gpu.since) for labels, gpu in gpus],
    )
    yield gauge(
        "gpu_plugin_gpu_signal_verdict",
        "The present verdict of each signal on a GPU: 0 fine, 1 an error of an application, 2 degraded, 3 fatal.",
        [
            (f"{labels},{signal}", worst.get(name, 0))
            for labels, gpu in gpus
            for worst in [_worst(gpu)]
            for name, signal in signals
        ],
    )
    yield gauge(
        "gpu_plugin_gpu_fault",
        "An open fault of a GPU, with the remedy: 2 degraded, 3 fatal.",
        _faults(gpus),
    )


def _faults(gpus: Gpus) -> Iterator[tuple[str, int]]:
    """Return a sample for each faulty signal and Xid, without orders. The worst verdict of its MIG devices counts."""
    for labels, gpu in gpus:
        worst: dict[tuple[str, int | None], Explanation] = {}
        for each in gpu.signals:
            if Verdict[each.verdict] >= Verdict.DEGRADED and each.name not in ORDER_SIGNALS:
                worst.setdefault((each.name, each.xid), each)  # the worst comes first
        for (signal, xid), each in worst.items():
            named = labelled(signal=signal, xid="" if xid is None else xid, action=each.action)
            yield f"{labels},{named}", Verdict[each.verdict].value


def _state(gpu: Gpu) -> str:
    if not gpu.healthy:
        return "unhealthy"
    return "degraded" if Verdict[gpu.verdict] >= Verdict.DEGRADED else "healthy"


def _worst(gpu: Gpu) -> Mapping[str, int]:
    """Return the worst verdict of each open signal, by its name."""
    worst: dict[str, int] = {}
    for signal in gpu.signals:
        if signal.name in SIGNALS:
            worst[signal.name] = max(Verdict[signal.verdict].value, worst.get(signal.name, 0))
    return worst


def _history(counters: Counters, labels: Mapping[str, str]) -> Iterator[Family]:
    yield gauge(
        "gpu_plugin_health_signal_supported",
        "Whether a GPU reports the values that a health signal needs.",
        [
            (f"{_of(uuid, labels)},{labelled(signal=signal)}", supported)
            for uuid, signals in counters.supported.items()
            for signal, supported in signals.items()
        ],
    )
    yield counter(
        "gpu_plugin_health_transitions_total",
        "Changes of verdict, by GPU, signal and new verdict.",
        [
            (
                f"{_of(each['uuid'], labels)},{labelled(signal=each['signal'], verdict=each['verdict'].lower())}",
                each["total"],
            )
            for each in counters.transitions
        ],
    )
    yield counter(
        "gpu_plugin_xid_errors_total",
        "Xid errors, by GPU, number and class in the Xid policy.",
        _xids(counters, labels),
    )
    yield gauge(
        "gpu_plugin_gpu_xid_first_timestamp_seconds",
        "Time of the first Xid of this number and class since the start, in Unix time.",
        [
            (f"{_of(each['uuid'], labels)},{labelled(xid=each['xid'], **{'class': each['class']})}", each["first"])
            for each in counters.xids
        ],
    )


def _xids(counters: Counters, labels: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Return a sample for each Xid of the policy's table on each GPU, and for other Xids that were reported."""
    known = [(xid, kind, labelled(xid=xid, **{"class": kind})) for xid, kind in counters.xid_classes.items()]
    counted: dict[str, dict[tuple[str, str], int]] = {uuid: {} for uuid in labels}
    for each in counters.xids:
        counted.setdefault(each["uuid"], {})[str(each["xid"]), each["class"]] = each["total"]
    for uuid, totals in counted.items():
        of = _of(uuid, labels)
        if uuid in labels:
            for xid, kind, text in known:
                yield f"{of},{text}", totals.pop((xid, kind), 0)
        for (xid, kind), total in sorted(totals.items()):
            yield f"{of},{labelled(xid=xid, **{'class': kind})}", total


def _of(uuid: str, labels: Mapping[str, str]) -> str:
    """Return the labels of a GPU. A GPU that the node no longer has has no index."""
    return labels.get(uuid) or labelled(uuid=uuid, index="")


def _readings(read: Read) -> Iterator[Family]:
    for name, key, about in _PLAIN:
        family = counter if name.endswith("_total") else gauge
        yield family(_PREFIX + name, about, [(labels, readings.get(key)) for labels, readings in read])
    yield gauge(
        "gpu_plugin_gpu_temperature_threshold_celsius",
        "Temperature limits of a GPU.",
        _several(read, "threshold", "{}_celsius", ("slowdown", "shutdown", "gpu_max", "memory_max")),
    )
    yield gauge(
        "gpu_plugin_gpu_remapped_rows",
        "Memory rows that were remapped in its life.",
        _several(read, "cause", "remapped_{}", ("correctable", "uncorrectable")),
    )
    yield gauge(
        "gpu_plugin_gpu_nvlinks", "NVLinks by state.", _several(read, "state", "nvlinks_{}", ("active", "inactive"))
    )
    yield gauge(
        "gpu_plugin_gpu_recovery_action",
        "The action that the driver requests (1), and the other actions (0).",
        _one_hot(read, "action", "recovery_action", RECOVERY_ACTIONS),
    )
    yield gauge(
        "gpu_plugin_gpu_fabric_state",
        "The state of a GPU in joining its NVLink fabric (1), and the other states (0).",
        _one_hot(read, "state", "fabric", FABRIC_STATES),
    )
    yield gauge(
        "gpu_plugin_gpu_clocks_event",
        "Whether clocks are limited for this reason.",
        [
            (f'{labels},reason="{reason}"', bool(mask & bit))
            for labels, readings in read
            if (mask := readings.get("clocks_events")) is not None
            for reason, bit in CLOCKS_EVENTS.items()
        ],
    )


def _several(read: Read, label: str, key: str, values: Sequence[str]) -> Iterator[tuple[str, float | None]]:
    """Return a sample for each of several readings. `key` is their name, with a place for the label's value."""
    for labels, readings in read:
        for value in values:
            yield f'{labels},{label}="{value}"', readings.get(key.format(value))


def _one_hot(read: Read, label: str, key: str, known: Sequence[str]) -> Iterator[tuple[str, int]]:
    for labels, readings in read:
        now = readings.get(key)
        if now is None:
            continue
        for value in known if now in known else (*known, now):
            yield f"{labels},{labelled(**{label: value})}", value == now


_PREFIX = "gpu_plugin_gpu_"  # the beginning of the table's names

# Families with one reading: name, the reading, and the help text. A name that ends in _total is a counter.
_PLAIN: tuple[tuple[str, str, str], ...] = (
    ("readings_timestamp_seconds", "at", "Time of the last look that read values, in Unix time."),
    ("temperature_celsius", "temperature_celsius", "Temperature of a GPU."),
    ("memory_temperature_celsius", "memory_temperature_celsius", "Temperature of its memory."),
    ("temperature_margin_celsius", "margin_celsius", "Degrees left to its T.Limit, negative beyond it."),
    ("power_watts", "power_watts", "Power draw."),
    ("power_limit_watts", "power_limit_watts", "The power limit in force."),
    ("energy_joules_total", "energy_joules", "Energy used since the driver was loaded."),
    ("utilization_ratio", "utilization_ratio", "Share of the last sample period of the driver in which a kernel ran."),
    ("memory_used_bytes", "memory_used_bytes", "Memory in use."),
    ("memory_total_bytes", "memory_total_bytes", "Size of its memory."),
    (
        "ecc_uncorrected_errors_total",
        "ecc_uncorrected",
        "Uncorrected memory errors since the driver was loaded or the GPU reset.",
    ),
    (
        "ecc_corrected_errors_total",
        "ecc_corrected",
        "Corrected memory errors since the driver was loaded or the GPU reset.",
    ),
    ("sram_threshold_exceeded", "sram_threshold", "Whether it has had more SRAM errors than allowed."),
    ("unrepairable_memory", "unrepairable_memory", "Whether it has memory that cannot be repaired."),
    ("row_remap_pending", "remap_pending", "Whether a memory row waits for a reset."),
    ("row_remap_failure", "remap_failure", "Whether a memory row could not be remapped."),
    ("retired_pages", "retired_pages", "Memory pages that were retired in its life."),
    ("retired_pages_pending", "retired_pending", "Whether memory pages wait for a reset to be retired."),
    ("nvlink_crc_errors_total", "nvlink_crc_errors", "CRC errors of all its NVLinks."),
    ("nvlink_failed_recoveries_total", "nvlink_failed_recoveries", "Recoveries of its NVLinks that failed."),
    ("pcie_link_lanes", "pcie_width", "Lanes that its PCIe link has."),
    ("pcie_link_max_lanes", "pcie_max_width", "Lanes that its PCIe link could have."),
    ("pcie_link_generation", "pcie_generation", "Generation of its PCIe link now, which an idle GPU lowers."),
    ("pcie_link_max_generation", "pcie_max_generation", "Generation that its PCIe link could have."),
    ("vgpu_licensed", "vgpu_licensed", "Whether a vGPU has its license."),
    ("pcie_replays_total", "pcie_replays", "Packets that were sent again on its PCIe link."),
    ("pcie_fatal_errors_total", "pcie_fatal_errors", "Fatal errors of its PCIe link."),
)
