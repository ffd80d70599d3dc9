"""The choices that operators make by name. Each has a line here, and a function with a decorator in another package.

The help texts, the JSON Schema and the accepted values are made from these lines. The decorator enters the function in the
`Registry` of its kind, which refuses a name without a line.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.sharing import DISTRIBUTED, PACKED, SPREAD

# How MIG devices are offered. The functions are in `devices.plan`.
MIG_STRATEGIES: Mapping[str, str] = {
    "none": "not at all",
    "single": "as nvidia.com/gpu",
    "mixed": "as nvidia.com/mig-<profile>",
}

# How the container runtime gets a container's devices. The functions are in `containers.edits`.
DEVICE_LIST_STRATEGIES: Mapping[str, str] = {
    "envvar": "an environment variable",
    "volume-mounts": "mounts",
    "cdi-annotations": "an annotation with CDI names",
    "cdi-cri": "CDI names",
}

# The GPUs from which shared devices are chosen. The functions are in `placement.shared`.
ALLOCATION_POLICIES: Mapping[str, str] = {
    DISTRIBUTED: "the most GPUs for a container, the least used ones first",
    PACKED: "the fewest GPUs for a container, the most used ones first",
    SPREAD: "the most GPUs for a container, the same number of devices from each",
}

# The health signals with a description of each; empty if `health.signals` of the config file cannot change its verdict. They are
# in the order of evaluation: signals that other signals' proofs depend on come first. The functions are in `health.signals`.
HEALTH_SIGNALS: Mapping[str, str] = {
    "hung": "",
    "unanswered": "queries to the GPU fail",
    "temperature": "a temperature close to the shutdown threshold",
    "reset-required": "",
    "slowdown-temperature": "a temperature at the slowdown threshold",
    "margin": "little margin left to a temperature limit",
    "hw-slowdown": "clocks reduced by heat or the power brake",
    "sram-threshold": "too many SRAM errors",
    "remap-failure": "a memory row that could not be remapped",
    "unrepairable-memory": "memory beyond repair",
    "retired-pages": "memory pages that wait for retirement",
    "driver": "",
    "vanished": "",
    "recovery-action": "the driver asks for a recovery",
    "fabric": "the NVLink fabric is not ready or not sound",
    "nvlink": "an NVLink that was up is down",
    "nvlink-errors": "errors on NVLinks",
    "pcie-width": "fewer PCIe lanes than there could be",
    "events": "the driver's events cannot be waited for",
    "lost": "",
    "xid": "",
    "application-errors": "many Xids of applications",
    "ecc-uncorrected": "uncorrected memory errors",
    "remap-pending": "a memory row that waits to be remapped",
    "driver-event": "an error that the driver reports as an event",
    "pcie-errors": "PCIe errors",
    "cordon": "",
    "node-cordon": "",
    "maintenance": "",
    "flapping": "unfit three times within an hour",
    "first-look": "",
}

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., object])


class NoFunctionError(ConfigError, LookupError):
    """A choice has a line and no function."""


class Registry(dict[str, S]):
    """The entry of each of `choices`, by name. Raises NoFunctionError for a choice without an entry.

    Error messages name the `kind` of choice, and the places of the `lines` and of the `functions`.
    """

    def __init__(self, kind: str, choices: Collection[str], lines: str, functions: str) -> None:
        super().__init__()
        self._kind, self._choices, self._lines, self._functions = kind, choices, lines, functions
        self._entered: dict[str, Callable[..., object]] = {}

    def enter(self, name: str, does: S, function: Callable[..., object]) -> None:
        """Enter `does`, which is made of `function`. Raises LookupError if the name has no line, or another function."""
        if name not in self._choices:
            raise LookupError(f"the {self._kind} {name!r} has a function and no line: add it to {self._lines}")
        if (other := self._entered.setdefault(name, function)) is not function:
            both = " and ".join(f"{each.__module__}.{each.__qualname__}" for each in (other, function))
            raise LookupError(f"the {self._kind} {name!r} has two functions, {both}: rename one of them")
        self[name] = does

    def __missing__(self, name: str) -> S:
        raise NoFunctionError(f"the {self._kind} {name!r} has no function: write one in {self._functions}")


class Functions(Registry[F]):
    """A registry whose entries are functions: the decorator `@functions("name")` enters a function."""

    def __call__(self, name: str) -> Callable[[F], F]:
        """Return a decorator that enters its function under this name. Raises LookupError if the name has no line."""

        def entered(function: F) -> F:
            self.enter(name, function, function)
            return function

        return entered


def listed(choices: Mapping[str, str]) -> str:
    """Return the choices and their descriptions as text for a sentence."""
    return ", ".join(f"{name} ({does})" for name, does in choices.items())
