"""The faults of `gpu-plugin fault` for a simulated node: the request, and the faults of events, whole GPUs and the node."""

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, EventType, RecoveryAction, Return
from gpu_plugin.health.latch import Proof, Verdict
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.simulation import device_nodes
from gpu_plugin.simulation.fault_values import Reader, flag, read_instance, read_profiles, read_seconds, whole
from gpu_plugin.simulation.gpu import SimulatedGpu
from gpu_plugin.simulation.gpu_faults import GPU_FAULTS, MASK, require
from gpu_plugin.simulation.hardware import SimulatedNode

# The action that a driver requests after a fatal Xid, by the Xid's way of recovery
_RECOVERIES = {Proof.RESET: int(RecoveryAction.GPU_RESET), Proof.REBOOT: int(RecoveryAction.NODE_REBOOT)}

# Applies a fault, as in `gpu_faults`, given the node, a GPU by index, the value, and options.
Effect = Callable[..., str]


def _xid(node: SimulatedNode, gpu: int, number: int, instance: str = "") -> str:
    of_gpu, _, of_compute = instance.partition("/")
    receivers = node.raise_xid(
        gpu,
        number,
        # An Xid of an instance only ends the work in the instance, so the driver requests no action for the whole GPU.
        0 if instance else _recovery_after(number),
        gpu_instance=int(of_gpu or ALL_INSTANCES),
        compute_instance=int(of_compute or ALL_INSTANCES),
    )
    where = f" on instance {instance}" if instance else ""
    return f"Xid {number} raised{where}" + ("" if receivers else ", and nothing listens for its events")


def _recovery_after(xid: int) -> int:
    """Return the action that a driver requests after this Xid: for a fatal Xid its recovery, else 0.

    For Xids whose severity the driver decides (109, 144 to 146), the simulated driver requests no action. `--recovery-action`
    changes that.
    """
    row = XID_TABLE.get(xid)
    return _RECOVERIES.get(row.recovery, 0) if row is not None and row.verdict is Verdict.FATAL else 0


def _event(node: SimulatedNode, gpu: int, kind: int) -> str:
    if kind & EventType.XID_CRITICAL:
        raise ConfigError(f"{kind:#x}: {int(EventType.XID_CRITICAL):#x} is an Xid: ask for xid")
    unknown = kind & ~(node.gpus[gpu].built.event_types or 0)
    require(node.gpus[gpu], not unknown, f"sends no events of type {unknown:#x}")
    receivers = node.post(gpu, kind)
    return f"event of type {kind:#x} sent" + ("" if receivers else ", and nothing listens for it")


def _lost(node: SimulatedNode, gpu: int, _: None) -> str:
    node.lose(gpu)
    return "fell off the bus, until healed"


def _vanish(node: SimulatedNode, gpu: int, _: None) -> str:
    node.vanish(gpu)
    return "gone from its driver, until it returns or is healed"


def _return(node: SimulatedNode, gpu: int, _: None) -> str:
    if not node.condition(gpu).vanished:
        raise ConfigError(f"GPU {gpu} has not vanished")
    node.bring_back(gpu)
    return "back, for whoever opens the driver from now on"


def _hang(node: SimulatedNode, gpu: int, seconds: float) -> str:
    node.hang(gpu, seconds)
    return f"every driver call hangs for {seconds:g} s"


def _mig(node: SimulatedNode, gpu: int, profiles: list[str] | None) -> str:
    node.partition(gpu, profiles)
    device_nodes.remake(node)
    node.post(gpu, EventType.MIG_CONFIG_CHANGE, 0)
    return (
        "out of MIG mode" if profiles is None else f"in MIG mode, partitioned into {', '.join(profiles) or 'nothing'}"
    )


def _reset(node: SimulatedNode, gpu: int, _: None) -> str:
    node.reset(gpu)
    off = node.condition(gpu)
    return "reset" + (", and still off the bus" if off.lost or off.vanished else "")


def _reset_keeping_energy(node: SimulatedNode, gpu: int, _: None) -> str:
    node.reset(gpu, energy=False)
    return "reset, and its energy counts on, as where the driver stays loaded"


def _heal(node: SimulatedNode, gpu: int, _: None) -> str:
    node.heal(gpu)
    return "repaired and reset"


# Faults of events and of whole GPUs by key, which is also the flag of `gpu-plugin fault`, with the readers of their values
_WHOLE_GPU: Mapping[str, tuple[Reader, Effect]] = {
    "xid": (whole(1, 999), _xid),  # Xids are numbered consecutively; the numbers in NVIDIA's catalog are below 200
    "event": (whole(1, MASK), _event),
    "lost": (flag, _lost),
    "vanish": (flag, _vanish),
    "return": (flag, _return),
    "hang": (read_seconds, _hang),
    "mig": (read_profiles, _mig),
    "reset": (flag, _reset),
    "reset-keeping-energy": (flag, _reset_keeping_energy),
    "heal": (flag, _heal),
}

FAULTS = (*_WHOLE_GPU, *GPU_FAULTS)  # the keys of all faults of a GPU


def _reboot(node: SimulatedNode, value: object) -> str:
    flag(value)
    node.reboot()
    return f"rebooted, with boot id {node.boot_id}"


def _init_error(node: SimulatedNode, value: object, times: float = math.inf) -> str:
    code = whole(1, Return.UNKNOWN)(value)
    node.refuse("open", code, times=times)
    often = "until the daemon ends" if times == math.inf else "once" if times == 1 else f"{times} times"
    return f"its driver refuses to be opened with {code}, {often}"


NODE_FAULTS: Mapping[str, Effect] = {"reboot": _reboot, "init-error": _init_error}  # They get no GPU.

# For each option, its fault and the reader of its value: the instance of an Xid, such as 1 or 1/0, without which the Xid is of
# the whole GPU; and the number of refusals to open the driver, without which they last while the daemon runs
_OPTIONS: Mapping[str, tuple[str, Reader]] = {
    "instance": ("xid", read_instance),
    "times": ("init-error", whole(1, 1000)),
}


def apply(node: SimulatedNode, request: Mapping[str, object]) -> str:
    """Apply a fault such as `{"gpu": 3, "xid": 79}` and return a sentence about it. `gpu` is an index or a uuid.

    The request is checked first. Driver threads see the fault before the node's state is on disk. The state is on disk when
    this returns, so it may block for as long as the disk does.

    Raises:
        ConfigError: there is no such GPU, not exactly one fault, or an invalid value.
    """
    known = (*FAULTS, *NODE_FAULTS)
    if unknown := set(request) - {*known, *_OPTIONS, "gpu"}:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such fault; there are {', '.join(known)}")
    asked = [name for name in known if name in request]
    if len(asked) != 1:
        raise ConfigError(f"one fault at a time, of {', '.join(known)}: {' and '.join(asked) or 'none'} given")
    (name,) = asked
    options = {}
    for option, (goes_with, read) in _OPTIONS.items():
        if option in request:
            if name != goes_with:
                raise ConfigError(f"{option}: goes only with {goes_with}, not with {name}")
            with _naming(option):
                options[option] = read(request[option])
    gpu = _find_gpu(node, request.get("gpu")) if name in FAULTS or "gpu" in request else None
    with _naming(name):
        if gpu is None or name in NODE_FAULTS:
            return f"The node: {NODE_FAULTS[name](node, request[name], **options)}."
        done = _apply(node, gpu, name, request[name], options)
    return f"{called(Gpu(gpu.built.uuid, gpu.index, pci_bus_id=gpu.built.pci_bus_id))}: {done}."


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Put a key before the text of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _apply(node: SimulatedNode, gpu: SimulatedGpu, name: str, value: object, options: Mapping[str, object]) -> str:
    if name in _WHOLE_GPU:
        read, effect = _WHOLE_GPU[name]
        return effect(node, gpu.index, read(value), **options)
    fault = GPU_FAULTS[name]
    content = fault.read(value)
    fault.check(gpu)
    with node.changing(gpu.index):
        done = fault.effect(gpu, content)
    if fault.posts:
        node.post(gpu.index, fault.posts)
    return done


def _find_gpu(node: SimulatedNode, value: object) -> SimulatedGpu:
    """Return the GPU with this index or uuid."""
    gpus = node.gpus
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < len(gpus):
            return gpus[value]
        raise ConfigError(
            f"GPU {value}: this node has {f'GPUs 0 to {len(gpus) - 1}' if len(gpus) > 1 else 'only GPU 0'}"
        )
    if not isinstance(value, str):
        raise ConfigError("gpu: missing: which GPU, by index or uuid")
    for gpu in gpus:
        if gpu.built.uuid == value:
            return gpu
    raise ConfigError(f"GPU {value}: no GPU of this node has this name; give an index from 0 to {len(gpus) - 1}")


def verb(node: SimulatedNode) -> Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]:
    """Return `apply` as a verb of the daemon's control socket: it gets a request and returns `{"done": sentence, "at": time}`.

    `at` is the time of the fault in seconds of this machine's monotonic clock, for measurements.
    """

    async def requested(request: Mapping[str, object]) -> Mapping[str, object]:
        from anyio import to_thread  # noqa: PLC0415 - reading a profile needs no event loop

        return await to_thread.run_sync(_timed, node, request)

    return requested


def _timed(node: SimulatedNode, request: Mapping[str, object]) -> Mapping[str, object]:
    at = time.monotonic()
    return {"done": apply(node, request), "at": at}
