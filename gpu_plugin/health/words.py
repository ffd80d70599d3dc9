"""What is said of signals beyond their own words."""

from gpu_plugin.health.context import Case
from gpu_plugin.health.latch import AnyLatch, LatchKey
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals import SIGNALS


def advice(key: LatchKey, policy: HealthPolicy, gpu: str, latch: AnyLatch) -> str:
    """What an operator is advised to do about an open latch of a GPU, which commands name by its uuid; empty for nothing."""
    said = SIGNALS[key.signal].action
    return (said if isinstance(said, str) else said(Case(key, latch, policy))).format(gpu=gpu)


def xid_number(key: LatchKey) -> int | None:
    """The Xid that a latch is of; None for any other signal."""
    return int(key.part) if SIGNALS[key.signal].numbered and key.part else None
