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

# Whether, and from which driver branch on, the driver's recovery action (NVML field 230) follows an Xid.
# Source: the catalog's column "Xid 154 linkage". `always` is "support with Xid introduction". `never` means that the
# catalog names no link: if a driver asks for no action, this proves nothing about such an Xid.
Link = Literal["never", "always", "R565", "R570", "R575"]

HOUR = 3600
DAY = 24 * HOUR


class Escalation(msgspec.Struct, frozen=True):
    """A rule: `count` of an Xid on one GPU within `within` seconds give the verdict `to`. Xids within 5 s count once."""

    to: Literal["degraded", "fatal"]
    count: int
    within: float


class WhileSignalOpen(msgspec.Struct, frozen=True):
    """A rule: the verdict of an Xid while the health signal of this name is open."""

    signal: str
    verdict: Literal["degraded", "fatal"]


class WithOtherXid(msgspec.Struct, frozen=True):
    """A rule: the verdict of an Xid if one of `xids` comes within `within` seconds of it.

    With `later`, the other Xid must come after it, and none may have come in the ten minutes before: such Xids belong to an
    application that keeps failing. The last second before it does not count, because reports of one instant arrive in any order.
    """

    xids: tuple[int, ...]
    verdict: Literal["degraded", "fatal"]
    within: float
    later: bool = False


class XidRow(msgspec.Struct, frozen=True):
    """The policy for some Xids.

    Attributes:
        codes: the Xid numbers.
        name: the meaning in a few words, printed after the number.
        verdict: `fatal`: the GPU is not fit for use. `degraded`: an operator should look at it, and pods still get it. `app`: an
            application's own error, counted. `ignore`: not an error, counted. If a driver requests a recovery, the verdict is
            fatal for an Xid that is linked or needs a reset. If a linked driver requests nothing for two minutes, a fatal
            verdict becomes degraded.
        recovery: the proof that the fault is over. `application`: 10 minutes without another. `quiet`: 24 hours without another,
            or the proof of a reset. `reset`: the GPU was reset, the driver loaded again or the node booted, and the GPU answers
            without a fault. `reboot`: the node was booted or the GPU bound again, and the GPU answers without a fault. `rma`: the
            part must be serviced.
        linked: whether the driver's recovery action follows the Xid.
        action: the catalog's immediate action.
        escalate: a rule for repeated Xids.
        beside: a rule for an open signal.
        brings: a rule for other Xids near it.
        silent: the verdict on a GPU that does not report NVML field 230.
        repeats: True if it counts towards a GPU on which applications of several pods fail.
        whole_gpu: True if it concerns all MIG devices, whichever instance the driver names.
        always: True if no recovery action lowers the verdict.
        look: True if the GPU must be read at once, because the recovery action changed.
        source: the source of the verdict, if that is not the catalog.
        note: advice to operators.
    """

    codes: tuple[int, ...]
    name: str
    verdict: Literal["ignore", "app", "degraded", "fatal"]
    recovery: Literal["application", "quiet", "reset", "reboot", "rma"]
    linked: Link
    action: Action = ""
    escalate: Escalation | None = None
    beside: WhileSignalOpen | None = None
    brings: WithOtherXid | None = None
    silent: Literal["", "degraded", "fatal"] = ""
    repeats: bool = False
    whole_gpu: bool = False
    always: bool = False
    look: bool = False
    source: str = ""
    note: str = ""

    @property
    def linked_since(self) -> int | None:
        """The first driver branch whose recovery action follows the Xid, 0 for all branches, None for no branch."""
        if self.linked.startswith("R"):
            return int(self.linked[1:])
        return 0 if self.linked == "always" else None


XidTable = Mapping[int, XidRow]  # Rows by Xid

ROWS = (
    # Errors of an application
    XidRow((8,), "channel idle timeout", "app", "application", "never", "RESTART_APP", repeats=True),
    XidRow((11, 25), "invalid or corrupted push buffer", "app", "application", "never", "RESTART_APP", repeats=True),
    XidRow((13,), "graphics engine exception", "app", "application", "never", "RESTART_APP", repeats=True),
    XidRow((31,), "GPU memory page fault", "app", "application", "never", "RESTART_APP", repeats=True),
    XidRow(
        (*range(39, 42), *range(70, 73), *range(75, 78), 85, *range(126, 136)),
        "copy engine error",
        "app",
        "application",
        "never",
        "RESTART_APP",
        repeats=True,
        note="reset the GPU if it repeats",
    ),
    XidRow((43,), "GPU stopped processing", "app", "application", "never", "IGNORE", repeats=True),
    XidRow((60,), "security engine video exception", "app", "application", "never", "RESTART_APP", repeats=True),
    XidRow(
        (68, *range(82, 85), 86, 88, 89, *range(96, 106), 139),
        "video processor exception",
        "app",
        "application",
        "never",
        "RESTART_APP",
        repeats=True,
        note="decoders, JPEG and optical flow engines",
    ),
    XidRow((69,), "graphics engine class error", "app", "application", "never", "RESTART_APP", repeats=True),
    # Errors between the driver and the GPU, on the PCIe link: "primarily quality issues on PCI, generally not caused by user
    # application actions" (of 32). The catalogue advises to restart the application, so one Xid is counted, and three within
    # an hour are DEGRADED.
    XidRow(
        (32,),
        "corrupted push buffer stream",
        "app",
        "application",
        "never",
        "RESTART_APP",
        escalate=Escalation("degraded", 3, HOUR),
        note="if it repeats, suspect the PCIe link",
    ),
    XidRow(
        (80,),
        "corrupted data sent to the GPU",
        "app",
        "application",
        "never",
        "RESTART_APP",
        escalate=Escalation("degraded", 3, HOUR),
        note="if it repeats, suspect the PCIe link",
    ),
    # Counted or ignored, without a need to act
    XidRow(
        (37, 38, 44, 66, 67, 141),
        "context-switch firmware or register access error",
        "app",
        "application",
        "never",
        "IGNORE",
    ),
    XidRow((106, 107), "SMBPBI test message", "ignore", "application", "never", "IGNORE"),
    XidRow((138,), "deep learning accelerator error", "app", "application", "never", "CONTACT_SUPPORT"),
    XidRow((152, 153), "deep learning accelerator message", "ignore", "application", "never", "IGNORE"),
    XidRow((159,), "CHI non-data error", "app", "application", "always", "CHECK_UVM"),
    XidRow((162, 163), "power smoothing state", "ignore", "application", "never", whole_gpu=True),
    # Xid 45 follows another error or the end of a process: "Control-C, GPU resets, sigkill are all examples". If it comes
    # alone, the catalogue advises to restart the fabric manager. This only matters if the fabric is not ready, and a GB200 node
    # has no fabric manager.
    XidRow(
        (45,),
        "preemptive cleanup",
        "app",
        "application",
        "never",
        "WORKFLOW_XID_45",
        beside=WhileSignalOpen("fabric", "degraded"),
    ),
    # Xid 154: the driver carries out or announces a recovery, which field 230 names. Without that field only the kernel's log
    # has the action, which may be "None". The catalogue calls it informational, always seen with another Xid. The other Xid
    # decides whether the GPU is fit.
    XidRow(
        (154,),
        "GPU recovery action changed",
        "app",
        "application",
        "never",
        "XID_154",
        silent="degraded",
        whole_gpu=True,
        look=True,
        note="the signal recovery-action judges the driver's request",
    ),
    # Memory
    XidRow(
        (48,),
        "double-bit ECC error",
        "fatal",
        "reset",
        "R565",
        "WORKFLOW_XID_48",
        brings=WithOtherXid((94,), "degraded", 5),
        note="contained if a 94 comes with it; "
        "if the SRAM threshold is passed or remapping failed, the part must be replaced",
    ),
    XidRow(
        (63,),
        "row remapping or page retirement recorded",
        "degraded",
        "reset",
        "R565",
        "IGNORE",
        note="the next reset puts it into effect; work is not affected",
    ),
    XidRow(
        (64,),
        "row remapping or page retirement failed",
        "fatal",
        "reset",
        "R565",
        "RESET_GPU",
        whole_gpu=True,
        note="if the failure stays after a reset, the part must be replaced",
    ),
    XidRow((92,), "high single-bit ECC error rate", "degraded", "quiet", "never", "IGNORE"),
    XidRow(
        (94,),
        "contained ECC error",
        "app",
        "application",
        "R565",
        "RESTART_APP",
        escalate=Escalation("degraded", 3, DAY),
        note="reset the GPU when it is idle",
    ),
    XidRow((95,), "uncontained ECC error", "fatal", "reset", "R565", "RESET_GPU", whole_gpu=True),
    XidRow((140,), "unrecovered ECC error", "fatal", "reset", "never", "RESET_GPU", whole_gpu=True),
    XidRow((156,), "resource retirement", "fatal", "reset", "R565", "RESET_GPU"),
    XidRow(
        (157,),
        "resource retirement failed",
        "degraded",
        "quiet",
        "never",
        "IGNORE",
        note="nothing is left to repair with; work goes on, and the same may come again",
    ),
    XidRow((160,), "channel retirement", "degraded", "quiet", "R575", "IGNORE"),
    XidRow((161,), "channel retirement failed", "degraded", "quiet", "R575", "IGNORE"),
    XidRow(
        (168,),
        "reduced memory capacity",
        "fatal",
        "reset",
        "never",
        whole_gpu=True,
        note="if a reset does not help, have it serviced",
    ),
    # Details of Xid 48: the kind of memory. No source says that Xid 94 contains these errors, so they last until a reset.
    XidRow((171,), "uncorrectable DRAM error", "fatal", "reset", "never", note="detail of 48"),
    XidRow((172,), "uncorrectable SRAM error", "fatal", "reset", "never", note="detail of 48"),
    # Engines and microcontrollers. The power, security and system processors (PMU, SEC2, GSP) serve every MIG device.
    XidRow((46,), "GPU timeout", "fatal", "reset", "never", "RESET_GPU"),
    XidRow((47, 65, 73), "video encoder error", "degraded", "quiet", "never", "CONTACT_SUPPORT"),
    XidRow((61,), "microcontroller breakpoint", "fatal", "reset", "never", "CONTACT_SUPPORT", whole_gpu=True),
    XidRow((62,), "microcontroller halt", "fatal", "reset", "R565", "RESET_GPU", whole_gpu=True),
    # An application alone can cause Xid 109, so no number of them makes a GPU unfit. Only the driver's request does, and on a
    # part without field 230 nothing does: otherwise a tenant whose program hangs makes one GPU after another unfit. NVIDIA's
    # device plugin ignores it.
    XidRow(
        (109,),
        "context switch timeout",
        "degraded",
        "quiet",
        "R570",
        "RESET_GPU",
        repeats=True,
        source="catalogue; internal/rm/health.go of NVIDIA's k8s-device-plugin",
    ),
    XidRow((110,), "security fault", "fatal", "reset", "R565", "RESET_GPU", whole_gpu=True),
    XidRow(
        (119,),
        "GSP RPC timeout",
        "fatal",
        "reset",
        "never",
        "RESET_GPU",
        whole_gpu=True,
        source="catalogue; NVIDIA/open-gpu-kernel-modules, kernel_gsp.c: "
        "logged at the first timeout, marked for a reset at the third",
        note="NVML calls may hang; often a reboot is needed",
    ),
    XidRow((120,), "GSP error", "fatal", "reset", "R565", "RESET_GPU", whole_gpu=True),
    XidRow((142,), "third video encoder error", "degraded", "rma", "never", "CONTACT_SUPPORT"),
    XidRow((143,), "GPU initialisation error", "fatal", "reset", "R575", "RESET_GPU", whole_gpu=True),
    XidRow(
        (151,), "confidential computing key rotation error", "fatal", "reboot", "never", "RESTART_VM", whole_gpu=True
    ),
    XidRow((169,), "security engine halt", "fatal", "reset", "never", whole_gpu=True),
    # The board, its power and its bus: all MIG devices share them
    XidRow((54,), "auxiliary power missing", "fatal", "reboot", "never", "CHECK_MECHANICALS", whole_gpu=True),
    XidRow((79,), "GPU has fallen off the bus", "fatal", "reboot", "R565", "RESTART_BM", whole_gpu=True, always=True),
    XidRow((93,), "InfoROM wear", "degraded", "quiet", "never", "IGNORE", whole_gpu=True),
    XidRow(
        (122,),
        "power management unit cannot read over SPI",
        "degraded",
        "quiet",
        "never",
        "CONTACT_SUPPORT",
        brings=WithOtherXid((31,), "fatal", 5, later=True),
        whole_gpu=True,
        source="SC '25: page faults of running applications follow four of five",
    ),
    XidRow(
        (123,),
        "power management unit cannot write over SPI",
        "fatal",
        "reset",
        "never",
        "CONTACT_SUPPORT",
        whole_gpu=True,
        source="NVSentinel (FATAL); GKE names it too. The catalogue no longer uses 122 to 125",
    ),
    XidRow(
        (124, 125),
        "SPI flash or InfoROM failure",
        "degraded",
        "quiet",
        "never",
        "CONTACT_SUPPORT",
        whole_gpu=True,
        source="NVSentinel calls every Xid FATAL that the catalogue does not use; no other source says that the GPU is unfit",
    ),
    XidRow((164, 165), "power smoothing failure", "degraded", "quiet", "never", whole_gpu=True),
    XidRow((167,), "PCIe fatal timeout", "fatal", "reboot", "never", whole_gpu=True),
    # NVLinks: MIG devices have no links of their own
    XidRow(
        (74,),
        "NVLink error",
        "degraded",
        "reset",
        "R565",
        "WORKFLOW_NVLINK_ERR",
        escalate=Escalation("fatal", 10, DAY),
        beside=WhileSignalOpen("nvlink", "fatal"),
        whole_gpu=True,
        source="SC '25: two of three come again although the links work",
        note="a link that stays down is the signal nvlink's",
    ),
    XidRow(
        (108,),
        "NVLink remote translation error",
        "degraded",
        "quiet",
        "never",
        "IGNORE",
        note="often the victim of a peer",
    ),
    XidRow((137,), "NVLink privilege error", "degraded", "quiet", "never", "IGNORE", note="often the victim of a peer"),
    XidRow(
        (121,),
        "C2C link error",
        "degraded",
        "quiet",
        "never",
        "IGNORE",
        whole_gpu=True,
        note="corrected errors without operational impact, which may repeat; a reset at the next occasion trains the link again",
    ),
    XidRow((136,), "NVLink training failed", "fatal", "reset", "R565", "RESET_GPU", whole_gpu=True),
    # NVLink 5: the immediate action depends on the sub-code, which only the kernel's log has. In the catalogue it is IGNORE or
    # RESET_GPU for 144 to 146 and 149, always IGNORE for 147 and 148, always RESET_GPU for 150.
    XidRow((144,), "NVLink SAW error", "degraded", "reset", "R565", "WORKFLOW_NVLINK5_ERR", whole_gpu=True),
    XidRow((145,), "NVLink RLW error", "degraded", "reset", "R565", "WORKFLOW_NVLINK5_ERR", whole_gpu=True),
    XidRow((146,), "NVLink TLW error", "degraded", "reset", "R565", "WORKFLOW_NVLINK5_ERR", whole_gpu=True),
    XidRow((147,), "NVLink TREX error", "app", "application", "R565", "WORKFLOW_NVLINK5_ERR", whole_gpu=True),
    XidRow((148,), "NVLink NVLPW_CTRL error", "app", "application", "R565", "WORKFLOW_NVLINK5_ERR", whole_gpu=True),
    XidRow((149,), "NVLink link event", "degraded", "reset", "R565", "WORKFLOW_NVLINK5_ERR", whole_gpu=True),
    XidRow((150,), "NVLink MSE watchdog", "fatal", "reset", "R565", "WORKFLOW_NVLINK5_ERR", whole_gpu=True),
    XidRow((155,), "NVLink software-defined error", "fatal", "reset", "R565", "RESET_GPU", whole_gpu=True),
    XidRow((158,), "fatal timeout", "fatal", "reset", "always", "RESET_GPU", whole_gpu=True),
    XidRow((166, 170), "NVLink confidential computing error", "degraded", "quiet", "never", whole_gpu=True),
    # vGPU
    XidRow((78,), "vGPU start error", "degraded", "reset", "never", "UPDATE_SWFW", note="update the driver"),
)

XID_TABLE: XidTable = {xid: row for row in ROWS for xid in row.codes}
