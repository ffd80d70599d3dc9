"""The device plugin API's generated messages, for the kubelet's side of it: the only betterproto import beside theirs.

The daemon does without them, and so without betterproto: it reads and writes with `wire`.
"""

from typing import TypeVar

import betterproto

from gpu_plugin.kubelet._api.v1beta1 import *  # noqa: F403 - every message

M = TypeVar("M", bound=betterproto.Message)


def decode(kind: type[M], data: bytes) -> M:
    """A message of a generated type. Raises ValueError on bytes that are none."""
    try:
        return kind().parse(data)
    except Exception as error:
        raise ValueError(f"no {kind.__name__} message: {error}") from error
