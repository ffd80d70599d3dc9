"""What faults are told, checked; and the sentences for what cannot be."""

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import ALL_INSTANCES
from gpu_plugin.simulation.hardware import SimulatedNode


def integer(name: str, value: object, low: int, high: int, unit: str = "") -> int:
    """The value, if it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    if not low <= value <= high:
        raise ConfigError(f"{name}: {value}: from {low} to {high}{unit}")
    return value


def mask(name: str, value: object, low: int = 0) -> int:
    """The value, if it is a mask of 32 bits, and no less than `low`."""
    return integer(name, value, low, 0xFFFFFFFF)


def said(name: str, value: object) -> None:
    """Nothing, if the value is true."""
    if value is not True:
        raise ConfigError(f"{name}: {value!r}: it is either asked for with true or left out")


def instances(value: object) -> tuple[int, int]:
    """The GPU instance and the compute instance that a text such as 1 or 1/0 names; without the latter all of the former."""
    if isinstance(value, str):
        numbers = value.split("/")
        if len(numbers) <= 2 and all(part.isascii() and part.isdecimal() and len(part) <= 2 for part in numbers):
            return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else ALL_INSTANCES
    raise ConfigError(f"instance: {value!r}: a GPU instance such as 1, or a compute instance of it such as 1/0")


def find_gpu(node: SimulatedNode, value: object) -> int:
    """The GPU that an index or a uuid names."""
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
        raise ConfigError(f"GPU {value}: no GPU of this node has this name; give an index from 0 to {len(gpus) - 1}")
    raise ConfigError("gpu: missing: which GPU, by index or uuid")


def lacks(node: SimulatedNode, gpu: int, name: str, what: str) -> ConfigError:
    """The error of a fault that this GPU cannot have: its model, and `what` it does not do."""
    return ConfigError(f"{name}: {node.profile.gpus[gpu].name}: the simulated one {what}")
