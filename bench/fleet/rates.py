"""How often what goes wrong: published counts, what was derived of them, and what is assumed because no study says.

A rate is of incidents a GPU-day. What an incident does is in `faults`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    "rsc": "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv:2410.21680",
    "byterobust": "ByteRobust, arXiv:2509.16293: NVIDIA's diagnostic finds 70 % of GPUs that corrupt data; read in notes on it",
    "minder": "Minder: Faulty Machine Detection, arXiv:2411.01791, shares of faults; read in published notes on it",
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
"""Interruptions by a faulty GPU. The study does not say by what, so the shares below are assumed: they add up to 1."""

_ECC_A100, _ECC_H100 = 24 / 283_271, 24 / 88_768
"""Uncorrectable memory errors, of the mean hours between them on a GPU."""

_REMAP_FAILURES = 8 / _H100_DAYS

_LINKS_A100 = 1_922 * (1 - 0.66) / _A100_DAYS
"""Incidents on NVLinks: 66 % of the errors follow another on the same GPU (the study's first version)."""

RATES: Mapping[str, Rate] = {
    "gsp-timeout": Rate(
        3_857 / 10 / _A100_DAYS,
        3 / _H100_DAYS,
        ("delta", "assumed"),
        "3,857 errors on A100, ten of them taken to be one incident (assumed); 3 on H100 (the Llama 3 run: 17 in 884,736 days)",
    ),
    "pmu-spi": Rate(77 / _A100_DAYS, 0.0, ("delta",), "77 errors on A100, none on H100"),
    "nvlink-transient": Rate(
        0.8 * _LINKS_A100,
        0.0,
        ("delta", "delta-v1", "assumed"),
        "1,922 errors on A100, 66 % of them repeated ones; 80 % taken to pass by themselves (assumed). None on H100",
    ),
    "nvlink-down": Rate(
        0.15 * _LINKS_A100,
        0.15 * _FAULTY,
        ("delta", "delta-v1", "llama", "assumed"),
        "15 % on A100 (assumed); on H100 15 % of the faulty GPUs, among which the run counts NVLink (share assumed)",
    ),
    "nvlink-flapping": Rate(
        0.05 * _LINKS_A100,
        0.05 * _FAULTY,
        ("delta", "delta-v1", "llama", "assumed"),
        "likewise the last 5 % (share assumed)",
    ),
    "ecc-contained": Rate(
        0.706 * _ECC_A100,
        0.92 * _ECC_H100 - _REMAP_FAILURES,
        ("delta", "delta-v1"),
        "one uncorrectable error in 283,271 h (A100), in 88,768 h (H100); remapping or containment mends 70.6 % (Ampere), 92 %",
    ),
    "ecc-uncontained": Rate(0.294 * _ECC_A100, 0.08 * _ECC_H100, ("delta", "delta-v1"), "the rest of them"),
    "remap-failure": Rate(0.0, _REMAP_FAILURES, ("delta",), "8 failed remappings on H100, none on A100"),
    "sram": Rate(
        19 / _LLAMA_DAYS, 19 / _LLAMA_DAYS, ("llama", "assumed"), "19 on H100; A100 taken to be the same (assumed)"
    ),
    "off-the-bus": Rate(
        0.35 * _FAULTY, 0.35 * _FAULTY, ("llama", "assumed"), "35 % of 148 faulty GPUs (share assumed)"
    ),
    "engine-hang": Rate(0.25 * _FAULTY, 0.25 * _FAULTY, ("llama", "assumed"), "25 % of them (share assumed)"),
    "wedged": Rate(0.10 * _FAULTY, 0.10 * _FAULTY, ("llama", "assumed"), "10 % of them (share assumed)"),
    "unanswering": Rate(0.10 * _FAULTY, 0.10 * _FAULTY, ("llama", "assumed"), "10 % of them (share assumed)"),
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
        _ECC_A100 * 8.6 / 25.7,
        _ECC_H100 * 8.6 / 25.7,
        ("minder", "delta"),
        "8.6 % of the faults beside 25.7 % of memory errors, by which it is scaled",
    ),
    "nvml-glitch": Rate(
        1e-3, 1e-3, ("assumed",), "one in a thousand days: the driver is slow or fails once, the GPU works"
    ),
}
"""By the name of the incident. The shares of faulty GPUs: 0.15 + 0.05 (H100's links) + 0.35 + 0.25 + 0.1 + 0.1 = 1."""

NODE_RATES: Mapping[str, Rate] = {
    "fabric-down": Rate(0.0, 1e-4, ("assumed",), "a node-day, all GPUs of it at once: its fabric is not ready"),
    "hot-room": Rate(1e-4, 1e-4, ("assumed",), "a node-day, all GPUs of it at once: the cooling fails for hours"),
}
"""The same, a node-day."""

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

OTHER_APPLICATION_XIDS = 0.02
"""Share of those whose Xid is another one that an application causes by itself (assumed)."""

UTILISATION = 0.8
"""Share of the time for which pods run on a GPU that is offered (`rsc`: above 80 %)."""
POD_HOURS = 2.0
"""Hours of a pod, on average (assumed)."""
TRY_HOURS = 1 / 6
"""Hours between pods that begin on a GPU on which every pod fails (assumed; one and the same is begun after 5 min at most)."""

OPERATOR_HOURS, OPERATOR_SPREAD = 4.0, 1.0
"""Median hours until an operator acts on an Unhealthy GPU, the spread of their logarithm (assumed; `delta` has up to 23 h)."""
COMPLAINT_HOURS, SILENT_HOURS = 12.0, 14 * 24.0
"""Median hours until one acts since pods fail on a GPU that is Healthy, and since they compute nonsense (assumed)."""

TEST_SECONDS, DIAGNOSED, CORRUPTION_FOUND = 900.0, 0.95, 0.7
"""Seconds that a test of a GPU takes after a repair (assumed), and the shares that it finds: of GPUs on which pods fail
(assumed), and of those that corrupt data (`byterobust`)."""

RECOVERABLE = 19.5 / (19.5 + 41.5)
"""Share of faulty GPUs that come back without being replaced (`crusoe`: 19.5 % recoverable, 41.5 % replaced)."""

RESTART_DAYS, ROLLOUT_DAYS, DOWN_SECONDS = 30.0, 30.0, (2.0, 30.0)
"""Days between the plugin's restarts by chance on a node, between rollouts everywhere, and for how long it is down (assumed)."""
REBOOT_DAYS, IDLE_RESET_DAYS = 60.0, 500.0
"""Days between reboots of a sound node, and resets of a sound GPU, for other reasons (assumed)."""
WITHOUT_PERSISTENCE = 0.1
"""Share of nodes without persistence mode, whose counters begin anew where the plugin was the last to have the driver open."""
IDLE = 1 - UTILISATION
"""Share of the time for which nobody else has it open."""
ENERGY_STAYS = 0.5
"""Share of nodes where resetting one GPU does not set its energy counter back, but only reloading the driver (assumed)."""
