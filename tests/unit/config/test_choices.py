"""What operators choose by name has a line and a function, and whoever forgets one of the two is told where it goes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import get_annotations, getmembers, isfunction
from pkgutil import iter_modules
from types import FunctionType, ModuleType
from typing import Any

import pytest

import gpu_plugin.doctor.checks
import gpu_plugin.health.signals
from gpu_plugin.access import container
from gpu_plugin.config import schema_v1, values
from gpu_plugin.config.choices import (
    ALLOCATION_POLICIES,
    DEVICE_LIST_STRATEGIES,
    HEALTH_SIGNALS,
    MIG_STRATEGIES,
    PLACE,
    Registry,
)
from gpu_plugin.config.options import Option, settable
from gpu_plugin.devices import plan
from gpu_plugin.doctor import registry
from gpu_plugin.health.signal import DEFINED
from gpu_plugin.placement import shared


def modules(package: ModuleType) -> list[ModuleType]:
    """Every file of a package, whether anybody imports it or not."""
    return [import_module(f"{package.__name__}.{each.name}") for each in iter_modules(package.__path__)]


@dataclass(frozen=True)
class Kind:
    """What is chosen by name: where its functions are, which of them are entered, and how one that is not gets there."""

    modules: list[ModuleType]
    entered: list[Callable[..., Any]]
    mend: str


KINDS = {
    "device list strategy": Kind(
        [container],
        [*container.STRATEGIES.values()],
        f'put @STRATEGIES("NAME") before it, and NAME into DEVICE_LIST_STRATEGIES of {PLACE}',
    ),
    "MIG strategy": Kind(
        [plan],
        [*plan.STRATEGIES.values()],
        f'put @STRATEGIES("NAME") before it, and NAME into MIG_STRATEGIES of {PLACE}',
    ),
    "allocation policy": Kind(
        [shared],
        [each.rank for each in shared.POLICIES.values()],
        f'put @policy("NAME", ...) before it, and NAME into ALLOCATION_POLICIES of {PLACE}',
    ),
    "health signal": Kind(
        modules(gpu_plugin.health.signals),
        [each.step for each in DEFINED.values()],
        f'put @signal("NAME", ...) before it, and NAME into HEALTH_SIGNALS of {PLACE}',
    ),
    "check of doctor": Kind(
        modules(gpu_plugin.doctor.checks),
        [*registry.CHECKS.values()],
        "put its name into NAMES of gpu_plugin/doctor/registry.py, and give its file the same name",
    ),
}
REGISTRIES: Mapping[str, tuple[Registry[Any], Mapping[str, str], str]] = {
    "device list strategy": (container.STRATEGIES, DEVICE_LIST_STRATEGIES, "DEVICE_LIST_STRATEGIES"),
    "MIG strategy": (plan.STRATEGIES, MIG_STRATEGIES, "MIG_STRATEGIES"),
    "allocation policy": (shared.POLICIES, ALLOCATION_POLICIES, "ALLOCATION_POLICIES"),
    "health signal": (DEFINED, HEALTH_SIGNALS, "HEALTH_SIGNALS"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_registry = pytest.mark.parametrize("kind", REGISTRIES)


def shape(function: Callable[..., Any]) -> tuple[str, ...]:
    """What it takes and gives, whatever it calls that, and whichever memory the latch of a signal has."""
    return tuple(re.sub(r"Latch\[\S*\]", "Latch", str(each)) for each in get_annotations(function).values())


def forgotten(kind: str) -> list[str]:
    """A sentence for each function that looks like one of these, and is none."""
    known = KINDS[kind]
    shapes = {shape(each) for each in known.entered}
    return [
        f"{function.__module__}.{function.__qualname__} is a {kind} that nobody can choose: {known.mend}"
        for module in known.modules
        for _, function in getmembers(module, isfunction)
        if function.__module__ == module.__name__ and function not in known.entered and shape(function) in shapes
    ]


@each_kind
def test_no_function_is_forgotten(kind):
    assert KINDS[kind].modules
    assert not forgotten(kind)


@each_kind
def test_a_function_that_is_forgotten_is_named_with_the_place_of_its_line(kind, monkeypatch):
    like = KINDS[kind].entered[0]
    assert isinstance(like, FunctionType)
    mine = FunctionType(like.__code__, like.__globals__, "mine")
    mine.__annotations__, mine.__module__, mine.__qualname__ = get_annotations(like), like.__module__, "mine"
    [module] = [each for each in KINDS[kind].modules if each.__name__ == like.__module__]
    monkeypatch.setattr(module, "mine", mine, raising=False)
    assert forgotten(kind) == [f"{module.__name__}.mine is a {kind} that nobody can choose: {KINDS[kind].mend}"]


@each_registry
def test_every_line_has_its_function(kind):
    functions, lines, _ = REGISTRIES[kind]
    assert [functions[name] for name in lines]
    assert set(functions) == set(lines)


@each_registry
def test_a_function_without_a_line_is_refused_in_a_sentence(kind):
    functions, _, table = REGISTRIES[kind]
    with pytest.raises(LookupError) as caught:
        functions.enter("mine", object())
    assert caught.value.args == (
        f"the {kind} 'mine' has a function and no line: add it to {table} in gpu_plugin/config/choices.py",
    )
    assert "mine" not in functions


@each_registry
def test_a_line_without_a_function_is_refused_in_a_sentence(kind):
    functions, _, _ = REGISTRIES[kind]
    with pytest.raises(
        LookupError, match=f"the {kind} 'mine' has a line in {PLACE} and no function: write one in .*gpu_plugin/"
    ):
        functions["mine"]


def test_a_check_without_a_function_is_refused_in_a_sentence():
    with pytest.raises(LookupError) as caught:
        registry.check("my-check")
    assert str(caught.value) == (
        "the check 'my-check' has a line in gpu_plugin/doctor/registry.py and no function: "
        "write my_check in gpu_plugin/doctor/checks/my_check.py"
    )


def option(name: str, file: str) -> Option:
    return Option(name, (name,), (name.upper(),), file, "", values.text, "what it does")


def test_an_option_without_a_field_is_refused_in_a_sentence():
    with pytest.raises(LookupError) as caught:
        settable((option("mine", "flags.mine"),))
    assert caught.value.args == (
        "the option 'mine' has no field: add it, with its type, to Settings in gpu_plugin/config/settings.py",
    )


def test_an_option_in_no_section_of_the_file_is_refused_in_a_sentence():
    with pytest.raises(LookupError) as caught:
        schema_v1.schema([option("log_level", "mine.logLevel")])
    assert str(caught.value) == (
        "the option 'log_level' has a place in mine of the config file, and there is no such section: "
        "add it to `schema` in gpu_plugin/config/schema_v1.py"
    )
