"""The rates of incidents: published counts, rates derived from them, and assumptions if no study has a rate.

A rate is the number of incidents in a GPU-day. `faults` has the effects of incidents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Part(StrEnum):
    """The GPU model of a node with 8 GPUs that are joined by NVSwitches. Half of the nodes have each model."""

    A100 = "A100"
    """Its driver does not report the recovery action, like most drivers in the studies of this model."""
    H100 = "H100"
    """Its driver reports the recovery action (NVML field 230)."""


SOURCES: Mapping[str, str] = {
    "delta": "Cui et al., Story of Two GPUs: Characterizing the Resilience of Hopper H100 and Ampere A100 GPUs, SC '25,"
    " arXiv:2503.11901v4: 448 A100 for 895 days, 608 H100 (GH200) for 146 days. Tables read in published notes on it",
    "delta-v1": "the same study's first version, arXiv:2503.11901v1: A100 and A40. Tables read in published notes on it",
    "llama": "The Llama 3 Herd of Models, arXiv:2407.21783, table 5: interruptions of 16,384 H100 in 54 days,"
    " as listed at glennklockwood.com/garden/component-reliability",
    "crusoe": "Crusoe at GTC 2025, faults of an H200 cluster, as listed at glennklockwood.com/garden/component-reliability",
    "rsc": "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv:2410.21680; read in"
    " published notes on it",
    "byterobust": "ByteRobust, arXiv:2509.16293: NVIDIA's diagnostic finds 70 % of GPUs that corrupt data; read in notes on it",
    "minder": "Minder: Faulty Machine Detection, arXiv:2411.01791, shares of faults; read in published notes on it",
    "dcgm": "NVIDIA's words on DCGM's fields: failed recoveries of NVLinks are counted from NVLink 5 on, not on A100 and H100",
    "kubernetes": "Kubernetes' documentation: a Job's backoffLimit of 6, restarts after 10 s doubled up to 5 min",
    "assumed": "no study with this rate was found; see the text of the rate",
}
"""The sources by the names that rates refer to."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The incidents in a GPU-day on each GPU model, the sources (names of `SOURCES`), and how the rate was derived."""

    a100: float
    h100: float
    sources: tuple[str, ...]
    derived: str

    def on(self, part: Part) -> float:
        """Return the rate on a GPU model."""
        return self.a100 if part is Part.A100 else self.h100


_A100_DAYS, _H100_DAYS, _LLAMA_DAYS = 448 * 895, 608 * 146, 16_384 * 54
"""GPU-days of the studies: 400,960; 88,768; 884,736."""

_FAULTY = 148 / _LLAMA_DAYS
"""Interruptions by a faulty GPU. The study does not have the kinds of faults, so their shares are assumed (`Assumed.faulty`)."""

_ECC_A100, _ECC_H100 = 24 / 283_271, 24 / 88_768
"""Uncorrectable memory errors, from the mean hours between two errors on a GPU."""

_REMAP_FAILURES = 8 / _H100_DAYS

_LINKS_A100 = 1_922 * (1 - 0.66) / _A100_DAYS
"""Incidents on NVLinks: 66 % of the errors follow another on the same GPU (the study's first version)."""

_PCIE = 8.6 / 25.7
"""The number of faults of PCIe links for each fault of memory (`minder`)."""

FAULTY: Mapping[str, float] = {
    "nvlink-down": 0.15,
    "nvlink-flapping": 0.05,
    "off-the-bus": 0.30,
    "pcie-fatal": 0.05,
    "engine-hang": 0.25,
    "wedged": 0.10,
    "unanswering": 0.10,
}
"""The kinds of faults of faulty GPUs. On A100, the rates of link faults are derived from link errors instead."""

LINKS: Mapping[str, float] = {"nvlink-transient": 0.80, "nvlink-down": 0.15, "nvlink-flapping": 0.05}
"""The outcomes of incidents on A100's NVLinks: they pass, the link stays down, or it fails again and again."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """The assumptions that no study has and that may affect the comparison of policies. `sensitivity` varies them.

    Attributes:
        faulty: the shares of the kinds of faulty GPUs. They add up to 1.
        links: the shares of the outcomes of link incidents. They add up to 1.
        gsp_errors: the number of errors in an incident of the GSP.
        often: factors for the rates of incidents, by name.
        kinds: changes to incidents, by their names and by the names of `faults.Kind`'s fields.
        operator_hours: the median hours until an operator acts on an Unhealthy GPU.
        complaint_hours: the median hours until an operator acts because pods fail on a Healthy GPU.
        test_seconds: the length of a test after a repair.
        diagnosed: the share of broken GPUs that the test finds.
        try_hours: the mean hours between two pods on a GPU on which every pod fails.
        energy_stays: the share of nodes on which a reload of the driver sets the energy counter back, and a reset of a GPU does
            not.
        without_persistence: the share of nodes whose counters restart if the plugin was the last program to close the driver.
        restart_days: the mean days between two random restarts of the plugin.
        others: the share of failing applications with an unusual Xid.
        counts_recoveries: whether the driver counts failed recoveries of NVLinks, which it does from NVLink 5 on (`dcgm`).
        action_seconds: the mean delay between the start of an incident and the driver's recovery action (NVML field 230, Xid
            154).
        heat_below: a GPU that heat breaks runs this number of °C below its shutdown threshold.
        heat_spread: the standard deviation of a hot GPU's readings in °C.
    """

    faulty: Mapping[str, float] = field(default_factory=lambda: FAULTY)
    links: Mapping[str, float] = field(default_factory=lambda: LINKS)
    gsp_errors: float = 10.0
    often: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    operator_hours: float = 4.0
    complaint_hours: float = 12.0
    test_seconds: float = 900.0
    diagnosed: float = 0.95
    try_hours: float = 1 / 6
    energy_stays: float = 0.5
    without_persistence: float = 0.1
    restart_days: float = 30.0
    others: float = 0.02
    counts_recoveries: bool = False
    action_seconds: float = 5.0
    heat_below: float = 1.0
    heat_spread: float = 1.0


ASSUMED = Assumed()


def incidents(assumed: Assumed = ASSUMED) -> dict[str, Rate]:
    """Return the rates of incidents by their names."""
    faulty, links = assumed.faulty, assumed.links
    found = {
        "gsp-timeout": Rate(
            3_857 / assumed.gsp_errors / _A100_DAYS,
            3 / _H100_DAYS,
            ("delta", "assumed"),
            "3,857 errors on A100, ten of them taken to be one incident (assumed); 3 on H100 (Llama 3: 17 in 884,736 days)",
        ),
        "pmu-spi": Rate(77 / _A100_DAYS, 0.0, ("delta",), "77 errors on A100, none on H100"),
        "nvlink-transient": Rate(
            links["nvlink-transient"] * _LINKS_A100,
            0.0,
            ("delta", "delta-v1", "assumed"),
            "1,922 errors on A100, 66 % of them repeated ones; 80 % taken to pass by themselves (assumed). None on H100",
        ),
        "nvlink-down": Rate(
            links["nvlink-down"] * _LINKS_A100,
            faulty["nvlink-down"] * _FAULTY,
            ("delta", "delta-v1", "llama", "assumed"),
            "15 % on A100 (assumed); on H100 15 % of the faulty GPUs, among which the run counts NVLink (share assumed)",
        ),
        "nvlink-flapping": Rate(
            links["nvlink-flapping"] * _LINKS_A100,
            faulty["nvlink-flapping"] * _FAULTY,
            ("delta", "delta-v1", "llama", "assumed"),
            "likewise the last 5 % (share assumed)",
        ),
        "ecc-contained": Rate(
            0.706 * _ECC_A100,
            0.92 * _ECC_H100 - _REMAP_FAILURES,
            ("delta", "delta-v1"),
            "one uncorrectable error in 283,271 h (A100), 88,768 h (H100); remapping or containment mends 70.6 % (Ampere), 92 %",
        ),
        "ecc-uncontained": Rate(0.294 * _ECC_A100, 0.08 * _ECC_H100, ("delta", "delta-v1"), "the rest of them"),
        "remap-failure": Rate(0.0, _REMAP_FAILURES, ("delta",), "8 failed remappings on H100, none on A100"),
        "sram": Rate(
            19 / _LLAMA_DAYS, 19 / _LLAMA_DAYS, ("llama", "assumed"), "19 on H100; A100 taken to be the same (assumed)"
        ),
        "off-the-bus": _faulty(assumed, "off-the-bus", "30 % of 148 faulty GPUs (share assumed)"),
        "pcie-fatal": _faulty(assumed, "pcie-fatal", "5 % of them (share assumed)"),
        "engine-hang": _faulty(assumed, "engine-hang", "25 % of them (share assumed)"),
        "wedged": _faulty(assumed, "wedged", "10 % of them (share assumed)"),
        "unanswering": _faulty(assumed, "unanswering", "10 % of them (share assumed)"),
        "silent-corruption": Rate(
            6 / _LLAMA_DAYS, 6 / _LLAMA_DAYS, ("llama", "assumed"), "6 on H100; A100 taken to be the same"
        ),
        "overheating": Rate(
            6 / _LLAMA_DAYS,
            6 / _LLAMA_DAYS,
            ("llama", "assumed"),
            "6 thermal interfaces or sensors; A100 taken to be the same",
        ),
        "pcie-lanes": Rate(
            _ECC_A100 * _PCIE,
            _ECC_H100 * _PCIE,
            ("minder", "delta"),
            "8.6 % of the faults beside 25.7 % of memory errors, by which it is scaled",
        ),
        "pcie-noise": Rate(
            _ECC_A100 * _PCIE,
            _ECC_H100 * _PCIE,
            ("minder", "assumed"),
            "as many as lose lanes (assumed): packets are sent again",
        ),
        "nvml-glitch": Rate(
            1e-3, 1e-3, ("assumed",), "one in a thousand days: the driver is slow or fails once, the GPU works"
        ),
    }
    return {name: _times(rate, assumed.often.get(name, 1.0)) for name, rate in found.items()}


def _faulty(assumed: Assumed, name: str, derived: str) -> Rate:
    rate = assumed.faulty[name] * _FAULTY
    return Rate(rate, rate, ("llama", "assumed"), derived)


def _times(rate: Rate, by: float) -> Rate:
    return replace(rate, a100=rate.a100 * by, h100=rate.h100 * by)


NODE_RATES: Mapping[str, Rate] = {
    "fabric-down": Rate(0.0, 1e-4, ("assumed",), "a node-day, all GPUs of it at once: its fabric is not ready"),
    "hot-room": Rate(1e-4, 1e-4, ("assumed",), "a node-day, all GPUs of it at once: the cooling fails for hours"),
}
"""The rates of incidents of a whole node, in a node-day, by name."""

TRIES_A_JOB = 3.0
"""The mean number of pods of a job that fails by its own fault (assumed; a Job starts up to 7, `kubernetes`)."""

APPLICATIONS = Rate(
    2 * 8_863 / _A100_DAYS / TRIES_A_JOB,
    2 * 1_737 / _H100_DAYS / TRIES_A_JOB,
    ("delta", "assumed"),
    "8,863 and 1,737 page faults (Xid 31), all taken for an application's; as many again of Xids 13 and 43, which the study"
    " leaves out (assumed); each pod of a job makes one",
)
"""Jobs whose every pod fails by its own fault."""

UTILISATION = 0.8
"""The share of the time for which pods run on an offered GPU (`rsc`: above 80 %)."""
POD_HOURS = 2.0
"""The mean hours of a pod (assumed)."""
OPERATOR_SPREAD = 1.0
"""The spread of the logarithm of hours until an operator acts (assumed; `delta` has up to 23 h)."""
SILENT_HOURS = 14 * 24.0
"""The median hours until an operator acts because pods compute wrong results (assumed)."""
CORRUPTION_FOUND = 0.7
"""The share of data-corrupting GPUs that a test finds (`byterobust`)."""

RECOVERABLE = 19.5 / (19.5 + 41.5)
"""The share of faulty GPUs that recover without a replacement (`crusoe`: 19.5 % recoverable, 41.5 % replaced)."""

ROLLOUT_DAYS, DOWN_SECONDS = 30.0, (2.0, 30.0)
"""Days between rollouts of the plugin to all nodes, and the length of a restart in seconds (assumed)."""
REBOOT_DAYS, IDLE_RESET_DAYS = 60.0, 500.0
"""Days between reboots of a sound node, and between resets of a sound GPU, for other reasons (assumed)."""
IDLE = 1 - UTILISATION
"""The share of the time for which only the plugin has the driver open."""
