"""Names: which resource names a kubelet takes, and how a device id is made and read."""

from collections.abc import Sequence

from gpu_plugin.config.names import DOMAIN

MAX_DEVICE_ID = 63
"""Longest device id the API's own comment allows (k8s.io/kubelet, deviceplugin/v1beta1, Device.ID)."""

MAX_LIST_BYTES = 4 * 1024 * 1024
"""The longest message that the kubelet's gRPC client reads (grpc-go, defaultClientMaxReceiveMessageSize)."""

PLACEHOLDER = "GPU-unreadable-"
"""Begins the made-up uuid of a GPU whose own is not known yet. Such a device is never healthy, so no pod can hold it."""


def placeholder(index: int) -> str:
    """The uuid that stands for that of a GPU which cannot be read."""
    return f"{PLACEHOLDER}{index}"


def is_placeholder(uuid: str) -> bool:
    """Whether a uuid is none, and stands for one that is not known."""
    return uuid.startswith(PLACEHOLDER)


def mig_resource(profile: str) -> str:
    """The resource that MIG devices of a profile are counted under: nvidia.com/mig-1g.10gb.me for 1g.10gb+me."""
    return f"{DOMAIN}/mig-{profile.replace('+', '.')}"


_MAX_SHOWN = 4


def first_few(items: Sequence[str]) -> str:
    """The first four items, quoted, and how many more there are: one file fits a whole cluster, so lists may be long."""
    shown = ", ".join(repr(item) for item in items[:_MAX_SHOWN])
    return f"{shown} and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else shown
