"""Faults: what `gpu-plugin fault` can do to a GPU of a simulated node. A new one is a function and its line in `FAULTS`."""

import time
from collections.abc import Awaitable, Callable, Mapping

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.nvml.port import EventType
from gpu_plugin.simulation import device_nodes
from gpu_plugin.simulation.hardware import SimulatedNode

_NONE, _EMPTY = "none", "empty"
"""What `mig` takes besides profiles: no MIG mode, and MIG mode without a MIG device (as an empty text is)."""

Fault = Callable[[SimulatedNode, int, object], str]
"""Applies a fault to a GPU by index with the value asked for; gives what was done, to follow "GPU 3 (GPU-...): ".

Raises:
    ConfigError: the value cannot be; nothing was done.
"""

_HIGHEST_XID = 999
"""Xids are counted up one by one; NVIDIA's catalogue is below 200."""

_COLDEST, _HOTTEST = -40, 200
"""°C. No sensor says more or less; a slip of the finger does."""

_LONGEST_HANG = 86400.0
"""Seconds: a day."""


def _xid(node: SimulatedNode, gpu: int, value: object) -> str:
    number = _integer("xid", value, 1, _HIGHEST_XID)
    heard = node.post(gpu, EventType.XID_CRITICAL, number)
    return f"Xid {number} raised" + ("" if heard else ", and nothing listens for its events")


def _temperature(node: SimulatedNode, gpu: int, value: object) -> str:
    celsius = _integer("temperature", value, _COLDEST, _HOTTEST, " °C")
    node.set_temperature(gpu, celsius)
    return f"now at {celsius} °C, until healed"


def _lost(node: SimulatedNode, gpu: int, value: object) -> str:
    _said("lost", value)
    node.lose(gpu)
    return "fell off the bus, until healed"


def _hang(node: SimulatedNode, gpu: int, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"hang: {value!r} is not a number of seconds")
    if not 0 < value <= _LONGEST_HANG:  # and not a number is neither
        raise ConfigError(f"hang: {value}: from above 0 to {_LONGEST_HANG:g} seconds")
    node.hang(gpu, value)
    return f"every driver call hangs for {value:g} s"


def _mig(node: SimulatedNode, gpu: int, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"mig: {value!r} is not a list of MIG profiles such as 3g.20gb,3g.20gb, nor {_EMPTY} nor {_NONE}"
        )
    profiles = [part.strip() for part in value.split(",")] if value.strip() not in ("", _EMPTY, _NONE) else []
    try:
        node.partition(gpu, None if value.strip() == _NONE else profiles)
    except ConfigError as error:
        raise ConfigError(f"mig: {error}") from None
    device_nodes.remake(node)
    node.post(gpu, EventType.MIG_CONFIG_CHANGE, 0)
    if value.strip() == _NONE:
        return "out of MIG mode"
    return f"in MIG mode, cut into {', '.join(profiles) or 'nothing'}"


def _heal(node: SimulatedNode, gpu: int, value: object) -> str:
    _said("heal", value)
    node.heal(gpu)
    return "repaired and reset"


FAULTS: Mapping[str, Fault] = {
    "xid": _xid,
    "temperature": _temperature,
    "lost": _lost,
    "hang": _hang,
    "mig": _mig,
    "heal": _heal,
}
"""By the key that asks for it, which is also the flag of `gpu-plugin fault`."""


def apply(node: SimulatedNode, request: Mapping[str, object]) -> str:
    """Does what `{"gpu": 3, "xid": 79}` asks for, and says so in one sentence. `gpu` is an index or a uuid.

    Everything is checked first. It is done for every driver thread to see before the node's state is on disk, and on
    disk before this returns: it may block for as long as a disk does.

    Raises:
        ConfigError: no such GPU, not exactly one fault, or a value that cannot be.
    """
    if unknown := set(request) - set(FAULTS) - {"gpu"}:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such fault; there are {', '.join(FAULTS)}")
    asked = [name for name in FAULTS if name in request]
    if len(asked) != 1:
        raise ConfigError(f"one fault at a time, of {', '.join(FAULTS)}: {' and '.join(asked) or 'none'} given")
    gpu = _gpu(node, request.get("gpu"))
    done = FAULTS[asked[0]](node, gpu, request[asked[0]])
    return f"GPU {gpu} ({node.profile.gpus[gpu].uuid}): {done}."


def verb(node: SimulatedNode) -> Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]:
    """`apply` as a verb of the daemon's control socket: a request's fields in, `{"done": sentence, "at": seconds}` out.

    `at` is when it was applied on this machine's monotonic clock, for whoever measures what follows.
    """

    async def fault(request: Mapping[str, object]) -> Mapping[str, object]:
        from anyio import to_thread  # noqa: PLC0415 - a profile's reader needs no event loop

        return await to_thread.run_sync(_timed, node, request)

    return fault


def _timed(node: SimulatedNode, request: Mapping[str, object]) -> Mapping[str, object]:
    at = time.monotonic()
    return {"done": apply(node, request), "at": at}


def _gpu(node: SimulatedNode, value: object) -> int:
    gpus = node.profile.gpus
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < len(gpus):
            return value
        raise ConfigError(
            f"GPU {value}: this node has {f'GPUs 0 to {len(gpus) - 1}' if len(gpus) > 1 else 'only GPU 0'}"
        )
    for index, gpu in enumerate(gpus):
        if gpu.uuid == value:
            return index
    if isinstance(value, str):
        raise ConfigError(f"GPU {value}: this node has no such uuid; say an index from 0 to {len(gpus) - 1}")
    raise ConfigError("gpu: missing: which GPU, by index or uuid")


def _integer(name: str, value: object, low: int, high: int, unit: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    if not low <= value <= high:
        raise ConfigError(f"{name}: {value}: from {low} to {high}{unit}")
    return value


def _said(name: str, value: object) -> None:
    if value is not True:
        raise ConfigError(f"{name}: {value!r}: it is either asked for with true or left out")
