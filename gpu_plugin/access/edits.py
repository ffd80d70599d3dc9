"""What a container is given so that it can reach its devices: CDI's word for it is container edits."""

from collections.abc import Mapping

import msgspec


class Mount(msgspec.Struct, frozen=True):
    """A bind mount into the container."""

    container_path: str
    host_path: str
    read_only: bool = False


class DeviceSpec(msgspec.Struct, frozen=True):
    """A device node for the container; `permissions` is a subset of "rwm"."""

    container_path: str
    host_path: str
    permissions: str = "rw"


class ContainerEdits(msgspec.Struct, frozen=True):
    """The answer for one container. Mappings keep their order; nothing is in it twice."""

    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceSpec, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
