"""How often what goes wrong: published counts, what was derived of them, and what is assumed because no study says.

A rate is of incidents a GPU-day. What an incident does is in `faults`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Part(StrEnum):
    """What the nodes have: 8 GPUs of one part, joined by NVSwitches. Half of the nodes have the one, half the other."""

    A100 = "A100"
    """A driver that does not tell which recovery a GPU needs, as most in the studies of this part did not."""
    H100 = "H100"
    """A driver that tells (NVML field 230)."""


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
    "assumed": "no study found that says; see the text beside it",
}
"""By the names that rates refer to."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Incidents a GPU-day on each part, where they are from (names of `SOURCES`), and how they were derived."""

    a100: float
    h100: float
    sources: tuple[str, ...]
    derived: str

    def on(self, part: Part) -> float:
        """The rate on a part."""
        return self.a100 if part is Part.A100 else self.h100


_A100_DAYS, _H100_DAYS, _LLAMA_DAYS = 448 * 895, 608 * 146, 16_384 * 54
"""GPU-days of the studies: 400,960; 88,768; 884,736."""

_FAULTY = 148 / _LLAMA_DAYS
"""Interruptions by a faulty GPU. The study does not say by what, so the shares are assumed (`Assumed.faulty`)."""

_ECC_A100, _ECC_H100 = 24 / 283_271, 24 / 88_768
"""Uncorrectable memory errors, of the mean hours between them on a GPU."""

_REMAP_FAILURES = 8 / _H100_DAYS

_LINKS_A100 = 1_922 * (1 - 0.66) / _A100_DAYS
"""Incidents on NVLinks: 66 % of the errors follow another on the same GPU (the study's first version)."""

_PCIE = 8.6 / 25.7
"""Faults of PCIe links for one of memory (`minder`)."""

FAULTY: Mapping[str, float] = {
    "nvlink-down": 0.15,
    "nvlink-flapping": 0.05,
    "off-the-bus": 0.30,
    "pcie-fatal": 0.05,
    "engine-hang": 0.25,
    "wedged": 0.10,
    "unanswering": 0.10,
}
"""How faulty GPUs fail. A100 has its links' faults by their own errors."""

LINKS: Mapping[str, float] = {"nvlink-transient": 0.80, "nvlink-down": 0.15, "nvlink-flapping": 0.05}
"""What becomes of the incidents on A100's NVLinks: they pass, the link stays down, or it fails again and again."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What no study says, as far as the policies may differ by it: `sensitivity` varies it.

    `faulty` and `links` are shares that add up to 1. `gsp_errors` are the errors of one incident of the GSP. `often` multiplies
    the rates of these incidents. `kinds` are changes to incidents, by their names and by the names of `faults.Kind`'s fields.
    `operator_hours` are the median hours until an operator acts on an Unhealthy GPU, `complaint_hours` until one acts since pods
    fail on a GPU that is Healthy, `test_seconds` what a test after a repair takes, `diagnosed` the share of broken GPUs that it
    finds. `try_hours` lie between pods that begin on a GPU on which every pod fails. `energy_stays` is the share of nodes where
    resetting one GPU does not set its energy counter back, but only reloading the driver; `without_persistence` that of those
    whose counters begin anew where the plugin was the last to have the driver open. `restart_days` lie between the plugin's
    restarts by chance. `others` is the share of failing applications whose Xid is another than the usual ones.
    `counts_recoveries`: the driver counts failed recoveries of NVLinks, as it does from NVLink 5 on (`dcgm`).

    `action_seconds` is the mean delay between the start of an incident and the recovery action that the driver reports for it
    (NVML field 230, and Xid 154). A GPU that heat breaks runs `heat_below` °C below its shutdown threshold. Readings of any hot
    GPU vary around its temperature by `heat_spread` °C (standard deviation).
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
    """Incidents a GPU-day, by their names."""
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
"""By the name of the incident, a node-day."""

TRIES_A_JOB = 3.0
"""How many pods of a job that fails by itself are begun, on average (assumed; a Job begins up to 7, `kubernetes`)."""

APPLICATIONS = Rate(
    2 * 8_863 / _A100_DAYS / TRIES_A_JOB,
    2 * 1_737 / _H100_DAYS / TRIES_A_JOB,
    ("delta", "assumed"),
    "8,863 and 1,737 page faults (Xid 31), all taken for an application's; as many again of Xids 13 and 43, which the study"
    " leaves out (assumed); each pod of a job makes one",
)
"""Jobs whose every pod fails by its own fault."""

UTILISATION = 0.8
"""Share of the time for which pods run on a GPU that is offered (`rsc`: above 80 %)."""
POD_HOURS = 2.0
"""Hours of a pod, on average (assumed)."""
OPERATOR_SPREAD = 1.0
"""Spread of the logarithm of hours until somebody acts (assumed; `delta` has up to 23 h for an operator)."""
SILENT_HOURS = 14 * 24.0
"""Median hours until an operator acts since pods compute nonsense (assumed)."""
CORRUPTION_FOUND = 0.7
"""Share of the GPUs that corrupt data which a test finds (`byterobust`)."""

RECOVERABLE = 19.5 / (19.5 + 41.5)
"""Share of faulty GPUs that come back without being replaced (`crusoe`: 19.5 % recoverable, 41.5 % replaced)."""

ROLLOUT_DAYS, DOWN_SECONDS = 30.0, (2.0, 30.0)
"""Days between rollouts of the plugin everywhere, and for how many seconds a restart has it down (assumed)."""
REBOOT_DAYS, IDLE_RESET_DAYS = 60.0, 500.0
"""Days between reboots of a sound node, and resets of a sound GPU, for other reasons (assumed)."""
IDLE = 1 - UTILISATION
"""Share of the time for which nobody but the plugin has the driver open."""
