"""Which GPUs an annotation of the Node cordons: a list like `0, 0000:1b:00.0, GPU-6f1c`. Pure."""

from collections.abc import Sequence

import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.gpu_names import HOW, named
from gpu_plugin.devices.node import Gpu
from gpu_plugin.runtime.printable import excerpt, printable

MAX_NAMES = 256
"""The maximum number of names that are read. A node has at most 16 GPUs."""

MAX_NAME_LENGTH = 128
"""The maximum number of characters of a name. A uuid has 40."""


class Cordoned(msgspec.Struct, frozen=True):
    """The uuids of the GPUs that the annotation names, and a sentence for each name that matches no GPU (at most 8)."""

    uuids: frozenset[str] = frozenset()
    complaints: tuple[str, ...] = ()


def cordoned(value: str | None, gpus: Sequence[Gpu]) -> Cordoned:
    """Return the GPUs of this node that the annotation names. `value` is None if there is no annotation."""
    names = list(dict.fromkeys(filter(None, (name.strip() for name in (value or "").split(",")))))
    found: set[str] = set()
    complaints: list[str] = []
    if len(names) > MAX_NAMES:
        complaints.append(f"{len(names) - MAX_NAMES} names are ignored: there are more than {MAX_NAMES}")
    for name in names[:MAX_NAMES]:
        try:
            gpu = named(name, gpus) if len(name) <= MAX_NAME_LENGTH else None
        except ConfigError as error:
            complaints.append(excerpt(printable(str(error))))
            continue
        if gpu is None:
            complaints.append(
                f"{excerpt(printable(name), MAX_NAME_LENGTH)} is not a GPU of this node: name one by {HOW}"
            )
        else:
            found.add(gpu.uuid)
    return Cordoned(frozenset(found), tuple(complaints[:8]))
