"""Facts about a GPU that an operator should handle, although the GPU is fit: a pending MIG mode, a missing license. Pure."""

from collections.abc import Iterator

import msgspec

from gpu_plugin.health.resetting import reset_commands


class Notice(msgspec.Struct, frozen=True):
    """A statement about a GPU, and the remedy."""

    found: str
    remedy: str


def notices(
    uuid: str, *, mig_pending: bool | None, vgpu_licensed: bool | None, persistent: bool, released: bool = False
) -> Iterator[Notice]:
    """Yield the notices about a GPU.

    Args:
        uuid: the uuid of the GPU.
        mig_pending: the MIG mode after the next reset, None if that is the same as now.
        vgpu_licensed: whether a vGPU has its license, None for other GPUs.
        persistent: whether the GPU is in persistence mode, in which the driver refuses a reset.
        released: whether it is released for maintenance.
    """
    if mig_pending is not None:
        now, after = ("off", "on") if mig_pending else ("on", "off")
        commands = reset_commands(uuid, released=released, persistent=persistent)
        yield Notice(
            f"MIG mode is {now}, and will be {after} after a reset of the GPU or a reboot",
            f"once no pod has the GPU: {commands}; or reboot the node; to take the change back: "
            f"nvidia-smi -i {uuid} -mig {int(not mig_pending)}",
        )
    if vgpu_licensed is False:
        yield Notice(
            "the vGPU has no license, so the driver limits it more and more, and may refuse CUDA",
            "put the client configuration token into /etc/nvidia/ClientConfigToken of the virtual machine and restart "
            "nvidia-gridd there; `nvidia-smi -q` shows the license, and the log of nvidia-gridd why it is refused",
        )
