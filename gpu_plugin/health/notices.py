"""Facts about a GPU that an operator should handle, although the GPU is fit: a pending MIG mode, a missing license. Pure."""

from collections.abc import Iterator

import msgspec


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A statement about a GPU. `action` is advice. `resets` is whether a reset ends it, and `undo` the command that does, too.

    `persistent` is whether the GPU is in persistence mode, in which the driver refuses a reset.
    """

    title: str
    found: str
    action: str
    resets: bool = False
    persistent: bool = False
    undo: str = ""


def notices(uuid: str, *, mig_pending: bool | None, vgpu_licensed: bool | None, persistent: bool) -> Iterator[Notice]:
    """Yield the notices about a GPU.

    Args:
        uuid: the uuid of the GPU.
        mig_pending: the MIG mode after the next reset, None if it will not change.
        vgpu_licensed: whether a vGPU has its license, None for other GPUs.
        persistent: whether the GPU is in persistence mode.
    """
    if mig_pending is not None:
        now, after = ("off", "on") if mig_pending else ("on", "off")
        yield Notice(
            title="a change of MIG mode is pending",
            found=f"MIG mode is {now}, and will be {after} after a reset of the GPU or a reboot",
            action="reset the GPU once no pod has it, or reboot the node",
            resets=True,
            persistent=persistent,
            undo=f"nvidia-smi -i {uuid} -mig {int(not mig_pending)}",
        )
    if vgpu_licensed is False:
        yield Notice(
            title="the vGPU has no license",
            found="the vGPU has no license, so the driver limits it more and more, and may refuse CUDA",
            action="put the client configuration token into /etc/nvidia/ClientConfigToken of the virtual machine and restart "
            "nvidia-gridd there; `nvidia-smi -q` shows the license, and the log of nvidia-gridd why it is refused",
        )
