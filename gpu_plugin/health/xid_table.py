"""The meaning of each Xid for its GPU, and the proof that the fault is over.

Numbers, names, actions and links are those of NVIDIA's catalog of Xid errors for Ampere and later, as of September 2026
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). Verdicts and recoveries are ours. The config file
(health.xid, health.xidClass) and the environment (DP_DISABLE_HEALTHCHECKS, DP_ENABLE_HEALTHCHECKS, XID_CONFIG) override any row.

Other sources:
    NVSentinel: distros/kubernetes/nvsentinel/charts/gpu-health-monitor/xiderrorsmapping.csv in github.com/NVIDIA/NVSentinel
    GKE: the Xids after which GKE's device plugin reports a GPU (GoogleCloudPlatform/container-engine-accelerators)
    SC '25: Cui et al., Story of Two GPUs, https://arxiv.org/abs/2503.11901
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.latch import REBOOT, RESET, Proof, Verdict

# Immediate actions of NVIDIA's catalog of Xid errors; empty if the catalog has none
Action = Literal[
    "",
    "CHECK_MECHANICALS",
    "CHECK_UVM",
    "CONTACT_SUPPORT",
    "IGNORE",
    "RESET_GPU",
    "RESTART_APP",
    "RESTART_BM",
    "RESTART_VM",
    "UPDATE_SWFW",
    "WORKFLOW_NVLINK5_ERR",
    "WORKFLOW_NVLINK_ERR",
    "WORKFLOW_XID_45",
    "WORKFLOW_XID_48",
    "XID_154",
]

# The first driver branch whose recovery action (NVML field 230) follows an Xid: the catalog's column "Xid 154 linkage".
# NEVER: the catalog names no link, so a driver that asks for no action proves nothing about the Xid.
Link = int | None
NEVER: Link = None
ALWAYS: Link = 0  # "support with Xid introduction"

HOUR = 3600.0
DAY = 24 * HOUR

# Verdicts of the table. An ignored Xid is only counted.
IGNORE, APP, DEGRADED, FATAL = Verdict.OK, Verdict.APP, Verdict.DEGRADED, Verdict.FATAL

_LINKS = "look at its NVLinks (nvidia-smi nvlink --status -i {gpu}), reset all GPUs that they join"
_VENDOR = "have the GPU inspected by its vendor"
_LOG = "look at the kernel's log and at NVIDIA's catalogue of Xid errors"
_CABLES = "check the GPU's power cables and seat, then reboot the node"
_RESTART_VM = "restart the virtual machine, or reboot the node"

# Advice for the immediate actions of NVIDIA's catalogue that lead to a proof; `{gpu}` is replaced by the GPU's uuid
_RECOVERIES: Mapping[Proof, Mapping[str, str]] = {
    Proof.RESET: {
        "CHECK_MECHANICALS": _CABLES,
        "RESET_GPU": RESET,
        "RESTART_BM": REBOOT,
        "RESTART_VM": _RESTART_VM,
        "UPDATE_SWFW": "update the driver and the firmware, then reset the GPU",
        "WORKFLOW_NVLINK5_ERR": _LINKS,
        "WORKFLOW_NVLINK_ERR": _LINKS,
        "WORKFLOW_XID_48": RESET,
    },
    Proof.REBOOT: {"CHECK_MECHANICALS": _CABLES, "RESTART_BM": REBOOT, "RESTART_VM": _RESTART_VM},
}

# Advice for the immediate actions of faults that end by themselves
_PASSING: Mapping[str, str] = {
    "CHECK_UVM": "look at the kernel's log for messages of the unified memory driver",
    "CONTACT_SUPPORT": f"if it comes again, {_VENDOR}",
    "RESTART_APP": "restart the application",
    "WORKFLOW_XID_45": "look for the error before it; without one, a process ended or was killed, or see the signal fabric",
    "XID_154": "carry out the driver's recovery action, which the kernel's log has as well",
}


class Companions(msgspec.Struct, frozen=True):
    """The `xids` that change an Xid's verdict if one comes `within` this time in seconds before or after it.

    With `later`, the other Xid must come after it, and none may have come in the ten minutes before: such Xids belong to an
    application that keeps failing. The last second before it does not count, because reports of one instant arrive in any order.
    """

    xids: frozenset[int]
    within: float
    later: bool = False


class XidRow(msgspec.Struct, frozen=True):
    """The policy for some Xids.

    Attributes:
        codes: the Xid numbers. Empty for an Xid that is not in the table.
        name: the meaning in a few words, printed after the number.
        verdict: its verdict by itself. If a driver requests a recovery, the verdict is FATAL for an Xid that is linked or needs a
            reset. If a linked driver requests nothing for two minutes, FATAL becomes DEGRADED.
        recovery: the proof that the fault is over. APPLICATION: 10 minutes without another. QUIET: 24 hours without another, or
            the proof of a reset. RESET: the GPU was reset, the driver loaded again or the node booted, and the GPU answers
            without a fault. REBOOT: the node was booted or the GPU bound again, and the GPU answers without a fault. RMA: the
            part must be serviced.
        action: the catalog's immediate action.
        linked: the first driver branch whose recovery action follows the Xid.
        raised: the verdict if it happened `count` times `within` this time in seconds, or with an Xid of `brings`. Xids within
            5 s count once.
        brings: other Xids that raise it. A row has either a `count` or `brings`.
        beside: a health signal, and the verdict while that signal is open.
        silent: the verdict on a GPU that does not report NVML field 230.
        repeats: True if it counts towards a GPU on which applications of several pods fail.
        whole_gpu: True if it concerns all MIG devices, whichever instance the driver names.
        firm: True if no recovery action changes the verdict, because the table fixes it or the operator set it.
        look: True if the GPU must be read at once, because the recovery action changed.
    """

    codes: tuple[int, ...] = ()
    name: str = ""
    verdict: Verdict = DEGRADED
    recovery: Proof = Proof.RESET
    action: Action = ""
    linked: Link = NEVER
    raised: Verdict = Verdict.OK
    count: int = 1
    within: float = 0.0
    brings: Companions | None = None
    beside: tuple[str, Verdict] | None = None
    silent: Verdict = Verdict.OK
    repeats: bool = False
    whole_gpu: bool = False
    firm: bool = False
    look: bool = False

    @property
    def resets(self) -> bool:
        """True if the driver may request a reset, or more, because of this Xid."""
        return not self.codes or self.linked is not None or self.recovery in (Proof.RESET, Proof.REBOOT, Proof.RMA)

    def set_to(self, verdict: Verdict) -> "XidRow":
        """Return the row with the operator's verdict, which no rule and no recovery action changes."""
        return replace(
            self,
            verdict=verdict,
            firm=True,
            raised=Verdict.OK,
            count=1,
            within=0.0,
            brings=None,
            beside=None,
            silent=Verdict.OK,
            repeats=self.repeats and verdict is Verdict.APP,
        )

    def answered_by(self, driver_branch: int | None) -> bool:
        """Return True if the recovery action of this driver branch follows this Xid, so that no request is evidence.

        A branch of None is unknown.
        """
        return self.linked is not None and driver_branch is not None and driver_branch >= self.linked

    def advised(self, verdict: Verdict, proof: Proof) -> str:
        """Return advice to the operator for this verdict and proof, in a few words with `{gpu}` for the GPU."""
        if proof is Proof.RMA:
            return _VENDOR
        if proof not in _RECOVERIES:
            unknown = verdict is Verdict.DEGRADED and self.action in ("", "RESET_GPU")
            return _PASSING.get(self.action, _LOG if unknown else "nothing need be done")
        if known := _RECOVERIES[proof].get(self.action):
            return known
        recovery = RESET if proof is Proof.RESET else REBOOT
        if self.action == "CONTACT_SUPPORT":
            return f"{recovery}; if it comes again, {_VENDOR}"
        if verdict is not Verdict.DEGRADED:
            return recovery
        if self.action == "IGNORE":
            return f"nothing at once, since work continues; {recovery}, which ends it"
        return f"{_LOG}; {recovery}"

    def proof(self, verdict: Verdict) -> Proof:
        """Return the proof that closes a latch of this verdict. Time alone closes no latch that is FATAL."""
        if verdict is Verdict.APP:
            return Proof.APPLICATION
        if verdict is Verdict.FATAL and self.recovery in (Proof.APPLICATION, Proof.QUIET):
            return Proof.RESET
        return Proof.QUIET if self.recovery is Proof.APPLICATION else self.recovery


XidTable = Mapping[int, XidRow]  # Rows by Xid

ROWS = (
    # Errors of an application
    XidRow((8,), "channel idle timeout", APP, Proof.APPLICATION, "RESTART_APP", repeats=True),
    XidRow((11, 25), "invalid or corrupted push buffer", APP, Proof.APPLICATION, "RESTART_APP", repeats=True),
    XidRow((13,), "graphics engine exception", APP, Proof.APPLICATION, "RESTART_APP", repeats=True),
    XidRow((31,), "GPU memory page fault", APP, Proof.APPLICATION, "RESTART_APP", repeats=True),
    # Reset the GPU if it repeats.
    XidRow(
        (*range(39, 42), *range(70, 73), *range(75, 78), 85, *range(126, 136)),
        "copy engine error",
        APP,
        Proof.APPLICATION,
        "RESTART_APP",
        repeats=True,
    ),
    XidRow((43,), "GPU stopped processing", APP, Proof.APPLICATION, "IGNORE", repeats=True),
    XidRow((60,), "security engine video exception", APP, Proof.APPLICATION, "RESTART_APP", repeats=True),
    # Decoders, JPEG and optical flow engines.
    XidRow(
        (68, *range(82, 85), 86, 88, 89, *range(96, 106), 139),
        "video processor exception",
        APP,
        Proof.APPLICATION,
        "RESTART_APP",
        repeats=True,
    ),
    XidRow((69,), "graphics engine class error", APP, Proof.APPLICATION, "RESTART_APP", repeats=True),
    # Errors between the driver and the GPU, on the PCIe link: "primarily quality issues on PCI, generally not caused by user
    # application actions" (of 32). The catalogue advises to restart the application, so one Xid is counted, and three within
    # an hour are DEGRADED.
    # If it repeats, suspect the PCIe link.
    XidRow(
        (32,),
        "corrupted push buffer stream",
        APP,
        Proof.APPLICATION,
        "RESTART_APP",
        raised=DEGRADED,
        count=3,
        within=HOUR,
    ),
    # If it repeats, suspect the PCIe link.
    XidRow(
        (80,),
        "corrupted data sent to the GPU",
        APP,
        Proof.APPLICATION,
        "RESTART_APP",
        raised=DEGRADED,
        count=3,
        within=HOUR,
    ),
    # Counted or ignored, without a need to act
    XidRow(
        (37, 38, 44, 66, 67, 141), "context-switch firmware or register access error", APP, Proof.APPLICATION, "IGNORE"
    ),
    XidRow((106, 107), "SMBPBI test message", IGNORE, Proof.APPLICATION, "IGNORE"),
    XidRow((138,), "deep learning accelerator error", APP, Proof.APPLICATION, "CONTACT_SUPPORT"),
    XidRow((152, 153), "deep learning accelerator message", IGNORE, Proof.APPLICATION, "IGNORE"),
    XidRow((159,), "CHI non-data error", APP, Proof.APPLICATION, "CHECK_UVM", linked=ALWAYS),
    XidRow((162, 163), "power smoothing state", IGNORE, Proof.APPLICATION, whole_gpu=True),
    # Xid 45 follows another error or the end of a process: "Control-C, GPU resets, sigkill are all examples". If it comes
    # alone, the catalogue advises to restart the fabric manager. This only matters if the fabric is not ready, and a GB200 node
    # has no fabric manager.
    XidRow((45,), "preemptive cleanup", APP, Proof.APPLICATION, "WORKFLOW_XID_45", beside=("fabric", DEGRADED)),
    # Xid 154: the driver carries out or announces a recovery, which field 230 names. Without that field only the kernel's log
    # has the action, which may be "None". The catalogue calls it informational, always seen with another Xid. The other Xid
    # decides whether the GPU is fit.
    # The signal recovery-action judges the driver's request.
    XidRow(
        (154,),
        "GPU recovery action changed",
        APP,
        Proof.APPLICATION,
        "XID_154",
        silent=DEGRADED,
        whole_gpu=True,
        look=True,
    ),
    # Memory
    # Contained if a 94 comes with it; if the SRAM threshold is passed or remapping failed, the part must be replaced.
    XidRow(
        (48,),
        "double-bit ECC error",
        FATAL,
        Proof.RESET,
        "WORKFLOW_XID_48",
        linked=565,
        raised=DEGRADED,
        brings=Companions(frozenset({94}), 5),
    ),
    # The next reset puts it into effect; work is not affected.
    XidRow((63,), "row remapping or page retirement recorded", DEGRADED, Proof.RESET, "IGNORE", linked=565),
    # If the failure stays after a reset, the part must be replaced.
    XidRow(
        (64,), "row remapping or page retirement failed", FATAL, Proof.RESET, "RESET_GPU", linked=565, whole_gpu=True
    ),
    XidRow((92,), "high single-bit ECC error rate", DEGRADED, Proof.QUIET, "IGNORE"),
    # Reset the GPU when it is idle.
    XidRow(
        (94,),
        "contained ECC error",
        APP,
        Proof.APPLICATION,
        "RESTART_APP",
        linked=565,
        raised=DEGRADED,
        count=3,
        within=DAY,
    ),
    XidRow((95,), "uncontained ECC error", FATAL, Proof.RESET, "RESET_GPU", linked=565, whole_gpu=True),
    XidRow((140,), "unrecovered ECC error", FATAL, Proof.RESET, "RESET_GPU", whole_gpu=True),
    XidRow((156,), "resource retirement", FATAL, Proof.RESET, "RESET_GPU", linked=565),
    # Nothing is left to repair with; work goes on, and the same may come again.
    XidRow((157,), "resource retirement failed", DEGRADED, Proof.QUIET, "IGNORE"),
    XidRow((160,), "channel retirement", DEGRADED, Proof.QUIET, "IGNORE", linked=575),
    XidRow((161,), "channel retirement failed", DEGRADED, Proof.QUIET, "IGNORE", linked=575),
    # If a reset does not help, have it serviced.
    XidRow((168,), "reduced memory capacity", FATAL, Proof.RESET, whole_gpu=True),
    # Details of Xid 48: the kind of memory. No source says that Xid 94 contains these errors, so they last until a reset.
    XidRow((171,), "uncorrectable DRAM error", FATAL, Proof.RESET),
    XidRow((172,), "uncorrectable SRAM error", FATAL, Proof.RESET),
    # Engines and microcontrollers. The power, security and system processors (PMU, SEC2, GSP) serve every MIG device.
    XidRow((46,), "GPU timeout", FATAL, Proof.RESET, "RESET_GPU"),
    XidRow((47, 65, 73), "video encoder error", DEGRADED, Proof.QUIET, "CONTACT_SUPPORT"),
    XidRow((61,), "microcontroller breakpoint", FATAL, Proof.RESET, "CONTACT_SUPPORT", whole_gpu=True),
    XidRow((62,), "microcontroller halt", FATAL, Proof.RESET, "RESET_GPU", linked=565, whole_gpu=True),
    # An application alone can cause Xid 109, so no number of them makes a GPU unfit. Only the driver's request does, and on a
    # part without field 230 nothing does: otherwise a tenant whose program hangs makes one GPU after another unfit. NVIDIA's
    # device plugin ignores it.
    # Source: catalogue; internal/rm/health.go of NVIDIA's k8s-device-plugin.
    XidRow((109,), "context switch timeout", DEGRADED, Proof.QUIET, "RESET_GPU", linked=570, repeats=True),
    XidRow((110,), "security fault", FATAL, Proof.RESET, "RESET_GPU", linked=565, whole_gpu=True),
    # Source: catalogue; NVIDIA/open-gpu-kernel-modules, kernel_gsp.c: logged at the first timeout, marked for a reset at the
    # third.
    # NVML calls may hang; often a reboot is needed.
    XidRow((119,), "GSP RPC timeout", FATAL, Proof.RESET, "RESET_GPU", whole_gpu=True),
    XidRow((120,), "GSP error", FATAL, Proof.RESET, "RESET_GPU", linked=565, whole_gpu=True),
    XidRow((142,), "third video encoder error", DEGRADED, Proof.RMA, "CONTACT_SUPPORT"),
    XidRow((143,), "GPU initialisation error", FATAL, Proof.RESET, "RESET_GPU", linked=575, whole_gpu=True),
    XidRow((151,), "confidential computing key rotation error", FATAL, Proof.REBOOT, "RESTART_VM", whole_gpu=True),
    XidRow((169,), "security engine halt", FATAL, Proof.RESET, whole_gpu=True),
    # The board, its power and its bus: all MIG devices share them
    XidRow((54,), "auxiliary power missing", FATAL, Proof.REBOOT, "CHECK_MECHANICALS", whole_gpu=True),
    XidRow(
        (79,), "GPU has fallen off the bus", FATAL, Proof.REBOOT, "RESTART_BM", linked=565, whole_gpu=True, firm=True
    ),
    XidRow((93,), "InfoROM wear", DEGRADED, Proof.QUIET, "IGNORE", whole_gpu=True),
    # Source: SC '25: page faults of running applications follow four of five.
    XidRow(
        (122,),
        "power management unit cannot read over SPI",
        DEGRADED,
        Proof.QUIET,
        "CONTACT_SUPPORT",
        raised=FATAL,
        brings=Companions(frozenset({31}), 5, later=True),
        whole_gpu=True,
    ),
    # Source: NVSentinel (FATAL); GKE names it too. The catalogue no longer uses 122 to 125.
    XidRow(
        (123,), "power management unit cannot write over SPI", FATAL, Proof.RESET, "CONTACT_SUPPORT", whole_gpu=True
    ),
    # Source: NVSentinel calls every Xid FATAL that the catalogue does not use; no other source says that the GPU is unfit.
    XidRow((124, 125), "SPI flash or InfoROM failure", DEGRADED, Proof.QUIET, "CONTACT_SUPPORT", whole_gpu=True),
    XidRow((164, 165), "power smoothing failure", DEGRADED, Proof.QUIET, whole_gpu=True),
    XidRow((167,), "PCIe fatal timeout", FATAL, Proof.REBOOT, whole_gpu=True),
    # NVLinks: MIG devices have no links of their own
    # Source: SC '25: two of three come again although the links work.
    # A link that stays down is the signal nvlink's.
    XidRow(
        (74,),
        "NVLink error",
        DEGRADED,
        Proof.RESET,
        "WORKFLOW_NVLINK_ERR",
        linked=565,
        raised=FATAL,
        count=10,
        within=DAY,
        beside=("nvlink", FATAL),
        whole_gpu=True,
    ),
    # Often the victim of a peer.
    XidRow((108,), "NVLink remote translation error", DEGRADED, Proof.QUIET, "IGNORE"),
    # Often the victim of a peer.
    XidRow((137,), "NVLink privilege error", DEGRADED, Proof.QUIET, "IGNORE"),
    # Corrected errors without operational impact, which may repeat; a reset at the next occasion trains the link again.
    XidRow((121,), "C2C link error", DEGRADED, Proof.QUIET, "IGNORE", whole_gpu=True),
    XidRow((136,), "NVLink training failed", FATAL, Proof.RESET, "RESET_GPU", linked=565, whole_gpu=True),
    # NVLink 5: the immediate action depends on the sub-code, which only the kernel's log has. In the catalogue it is IGNORE or
    # RESET_GPU for 144 to 146 and 149, always IGNORE for 147 and 148, always RESET_GPU for 150.
    XidRow((144,), "NVLink SAW error", DEGRADED, Proof.RESET, "WORKFLOW_NVLINK5_ERR", linked=565, whole_gpu=True),
    XidRow((145,), "NVLink RLW error", DEGRADED, Proof.RESET, "WORKFLOW_NVLINK5_ERR", linked=565, whole_gpu=True),
    XidRow((146,), "NVLink TLW error", DEGRADED, Proof.RESET, "WORKFLOW_NVLINK5_ERR", linked=565, whole_gpu=True),
    XidRow((147,), "NVLink TREX error", APP, Proof.APPLICATION, "WORKFLOW_NVLINK5_ERR", linked=565, whole_gpu=True),
    XidRow(
        (148,), "NVLink NVLPW_CTRL error", APP, Proof.APPLICATION, "WORKFLOW_NVLINK5_ERR", linked=565, whole_gpu=True
    ),
    XidRow((149,), "NVLink link event", DEGRADED, Proof.RESET, "WORKFLOW_NVLINK5_ERR", linked=565, whole_gpu=True),
    XidRow((150,), "NVLink MSE watchdog", FATAL, Proof.RESET, "WORKFLOW_NVLINK5_ERR", linked=565, whole_gpu=True),
    XidRow((155,), "NVLink software-defined error", FATAL, Proof.RESET, "RESET_GPU", linked=565, whole_gpu=True),
    XidRow((158,), "fatal timeout", FATAL, Proof.RESET, "RESET_GPU", linked=ALWAYS, whole_gpu=True),
    XidRow((166, 170), "NVLink confidential computing error", DEGRADED, Proof.QUIET, whole_gpu=True),
    # vGPU
    # Update the driver.
    XidRow((78,), "vGPU start error", DEGRADED, Proof.RESET, "UPDATE_SWFW"),
)

XID_TABLE: XidTable = {xid: row for row in ROWS for xid in row.codes}
