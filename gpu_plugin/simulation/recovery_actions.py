"""Which recovery a simulated driver asks for, and after which Xid, as field 230 (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) has it."""

from collections.abc import Mapping

from gpu_plugin.devices.nvml_h import RecoveryAction
from gpu_plugin.sources.xid_table import shipped_table

NUMBERS: Mapping[str, int] = {action.name.lower().replace("_", "-"): int(action) for action in RecoveryAction}
"""nvmlDeviceGpuRecoveryAction_t by the words that `gpu-plugin fault` takes for it."""

_BY_RECOVERY = {"reset": int(RecoveryAction.GPU_RESET), "reboot": int(RecoveryAction.NODE_REBOOT)}


def after_xid(xid: int) -> int:
    """What a driver asks for after this Xid: what ends it where it is fatal, else nothing (0).

    Of Xids whose gravity the driver itself decides (109, 144 to 146), the simulated one says: none. `--recovery-action` has
    it say otherwise.
    """
    row = shipped_table().get(xid)
    return _BY_RECOVERY.get(row.recovery, 0) if row is not None and row.verdict == "fatal" else 0
