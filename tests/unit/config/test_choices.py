"""Each choice by name has a line and a function. Errors name the place of a missing line or function."""

import re
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from inspect import get_annotations, getmembers, isfunction
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType, ModuleType
from typing import Any

import pytest

import gpu_plugin.doctor.checks
import gpu_plugin.health.signals
from gpu_plugin import cli
from gpu_plugin.config.choices import (
    ALLOCATION_POLICIES,
    DEVICE_LIST_STRATEGIES,
    HEALTH_SIGNALS,
    MIG_STRATEGIES,
    Registry,
)
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.containers import edits
from gpu_plugin.daemon import process
from gpu_plugin.devices import plan
from gpu_plugin.devices.device import whole_gpu
from gpu_plugin.devices.node import Gpu
from gpu_plugin.doctor import check
from gpu_plugin.health.signal import DEFINED
from gpu_plugin.placement import shared

ROOT = Path(__file__).parents[3]
CHOICES = "gpu_plugin/config/choices.py"


def modules(package: ModuleType) -> list[ModuleType]:
    """Import and return every module of a package."""
    return [import_module(f"{package.__name__}.{each.name}") for each in iter_modules(package.__path__)]


@dataclass(frozen=True)
class Kind:
    """A kind of choice: its registry and lines, the place of the functions, and the entered functions."""

    registry: Registry[Any]
    lines: Collection[str]
    place: str
    modules: list[ModuleType]
    entered: list[Callable[..., Any]]
    decorator: str


KINDS = {
    "device list strategy": Kind(
        edits.STRATEGIES,
        DEVICE_LIST_STRATEGIES,
        f"DEVICE_LIST_STRATEGIES in {CHOICES}",
        [edits],
        [*edits.STRATEGIES.values()],
        '@STRATEGIES("NAME")',
    ),
    "MIG strategy": Kind(
        plan.STRATEGIES,
        MIG_STRATEGIES,
        f"MIG_STRATEGIES in {CHOICES}",
        [plan],
        [*plan.STRATEGIES.values()],
        '@STRATEGIES("NAME")',
    ),
    "allocation policy": Kind(
        shared.POLICIES,
        ALLOCATION_POLICIES,
        f"ALLOCATION_POLICIES in {CHOICES}",
        [shared],
        [each.rank for each in shared.POLICIES.values()],
        '@policy("NAME", ...)',
    ),
    "health signal": Kind(
        DEFINED,
        HEALTH_SIGNALS,
        f"HEALTH_SIGNALS in {CHOICES}",
        modules(gpu_plugin.health.signals),
        [each.step for each in DEFINED.values()],
        '@signal("NAME", ...)',
    ),
    "check": Kind(
        check.check,
        check.NAMES,
        "NAMES in gpu_plugin/doctor/check.py",
        modules(gpu_plugin.doctor.checks),
        [*check.check.values()],
        '@check("NAME")',
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def shape(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the types of parameters and result, without the type of the state of a latch."""
    return tuple(re.sub(r"Latch\[\S*\]", "Latch", str(each)) for each in get_annotations(function).values())


def forgotten(kind: str) -> list[str]:
    """Return a sentence for each other function of the same shape. Private functions are helpers."""
    known = KINDS[kind]
    shapes = {shape(each) for each in known.entered}
    helpers = not any(each.__name__.startswith("_") for each in known.entered)
    return [
        f"{function.__module__}.{function.__qualname__} is a {kind} that nobody can choose: "
        f"put {known.decorator} before it, and NAME into {known.place}"
        for module in known.modules
        for _, function in getmembers(module, isfunction)
        if function.__module__ == module.__name__
        and function not in known.entered
        and shape(function) in shapes
        and not (helpers and function.__name__.startswith("_"))
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
    [sentence] = forgotten(kind)
    assert sentence.startswith(
        f"{module.__name__}.mine is a {kind} that nobody can choose: put {KINDS[kind].decorator} before it"
    )
    assert sentence.endswith(f" and NAME into {KINDS[kind].place}")


@each_kind
def test_every_line_has_its_function(kind):
    assert [KINDS[kind].registry[name] for name in KINDS[kind].lines]
    assert set(KINDS[kind].registry) == set(KINDS[kind].lines)


@each_kind
def test_errors_name_the_place_of_a_missing_line_or_function_and_both_functions_of_a_name(kind):
    known = KINDS[kind]
    name, first = next(iter(known.registry)), known.entered[0]
    before = dict(known.registry)
    with pytest.raises(LookupError) as no_line:
        known.registry.enter("mine", object(), print)
    assert no_line.value.args == (f"the {kind} 'mine' has a function and no line: add it to {known.place}",)
    with pytest.raises(LookupError) as twice:
        known.registry.enter(name, object(), copied)
    both = f"{first.__module__}.{first.__qualname__} and {__name__}.copied"
    assert twice.value.args == (f"the {kind} {name!r} has two functions, {both}: rename one of them",)
    assert known.registry == before
    with pytest.raises(LookupError) as no_function:
        known.registry["mine"]
    said, place = str(no_function.value).split(": write one in ")
    assert said == f"the {kind} 'mine' has no function"
    assert (ROOT / place.removeprefix("a file of ")).exists()


def copied() -> None:
    """A function whose decorator was left as it was in the file that it was copied from."""


CHOSEN = {
    "device list strategy": ("device_list_strategy", "cdi-cri"),
    "MIG strategy": ("mig_strategy", "mixed"),
    "allocation policy": ("shared_devices_allocation_policy", "packed"),
}
each_chosen = pytest.mark.parametrize("kind", CHOSEN)


@pytest.fixture
def unwritten(kind, monkeypatch):
    """Settings that choose what has a line and no function, and the sentence on it."""
    name, value = CHOSEN[kind]
    monkeypatch.delitem(KINDS[kind].registry, value)
    with pytest.raises(LookupError) as caught:
        KINDS[kind].registry[value]
    return {name: value}, str(caught.value)


@each_chosen
async def test_a_daemon_does_not_start_with_a_choice_that_has_no_function(unwritten, monkeypatch, short_path):
    flags, sentence = unwritten
    monkeypatch.setattr(process, "configure", lambda *_: None)
    directories = {"device_plugin_dir": str(short_path), "state_dir": str(short_path / "state"), "simulate": "t4-4"}
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        await process.serve(
            resolve({**directories, **flags}, {}), lambda _: pytest.fail("it was asked for a newer one")
        )


@each_chosen
def test_a_choice_without_a_function_is_invalid(unwritten, capsys):
    [(name, value)], sentence = unwritten[0].items(), unwritten[1]
    assert cli.main(["validate", "--env", f"--{name.replace('_', '-')}", value]) == 2
    assert capsys.readouterr().out == f"flags and environment: {sentence}\n"


@each_chosen
def test_newer_settings_with_a_choice_without_a_function_are_refused(unwritten):
    flags, sentence = unwritten
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        process._checked(lambda _: resolve(flags, {}))(None)


@pytest.mark.parametrize("kind", ["device list strategy"])
def test_no_container_is_admitted_with_less_than_was_chosen(unwritten):
    strategies = ("envvar", unwritten[0]["device_list_strategy"])
    with pytest.raises(LookupError, match=re.escape(unwritten[1])):
        edits.container_edits([whole_gpu(Gpu(uuid="GPU-a", index=0))], edits.Access(strategies))


def test_a_daemon_does_not_start_with_a_health_signal_that_has_no_function():
    program = (
        "from gpu_plugin import cli; from gpu_plugin.config.choices import HEALTH_SIGNALS; "
        "HEALTH_SIGNALS['mine'] = ''; raise SystemExit(cli.main(['run', '--simulate', 't4-4']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("the health signal 'mine' has no function: write one in a file of") == 1
    assert "Traceback" not in done.stderr
