from typing import Any

import msgspec
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.cdi.options import (
    IDLE_FEATURE_FLAGS,
    NO_GIDS,
    CdiOptions,
    cdi_options,
    ignored_options,
)
from gpu_plugin.containers.cdi.readiness import NOT_YET, CdiReadiness
from gpu_plugin.containers.edits import Access


def settings_of(**changes: Any) -> Settings:
    return msgspec.structs.replace(resolve({}, {}), **changes)


def test_what_the_operator_said_and_the_node_has():
    settings = settings_of(
        driver_root="/run/nvidia/driver/",
        nvidia_cdi_hook_path="/usr/bin/nvidia-cdi-hook",
        cdi_disable_hooks=("enable-cuda-compat",),
        cdi_feature_flags=("disable-ipc-discoverer",),
    )
    access = Access(dev_root="/", cdi_classes=("gds",), imex_channels=(0,))
    assert cdi_options(settings, access) == CdiOptions(
        driver_root="/run/nvidia/driver",
        dev_root="",
        classes=("gds",),
        imex_channels=(0,),
        hook="/usr/bin/nvidia-cdi-hook",
        disabled_hooks=frozenset({"enable-cuda-compat"}),
        feature_flags=frozenset({"disable-ipc-discoverer"}),
    )
    assert ignored_options(settings) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            settings_of(cdi_feature_flags=IDLE_FEATURE_FLAGS[:1]),
            f"{IDLE_FEATURE_FLAGS[0]} is not supported and changes nothing",
        ),
        (settings_of(cdi_feature_flags=(NO_GIDS, "new-flag")), "--cdi-feature-flags: new-flag is not known"),
        (settings_of(cdi_disable_hooks=("all",)), "no hook is used without --nvidia-cdi-hook-path"),
        (
            settings_of(cdi_disable_hooks=("links",), nvidia_cdi_hook_path="/x"),
            "--cdi-disable-hooks: links is not a hook",
        ),
        (settings_of(cdi_disable_hooks=("create-symlinks",), nvidia_cdi_hook_path="/x"), "may not find libcuda.so.1"),
    ],
)
def test_what_changes_nothing_is_said(settings, words):
    (sentence,) = ignored_options(settings)
    assert words in sentence


def test_why_a_device_cannot_be_used_by_its_name():
    assert CdiReadiness().reason("GPU-0") == NOT_YET
    ready = CdiReadiness({"GPU-0": frozenset()}, "", {"GPU-1": "its node is missing"})
    assert [ready.reason(name) for name in ("GPU-0", "GPU-1", "GPU-2")] == ["", "its node is missing", NOT_YET]
    assert CdiReadiness({"GPU-0": frozenset()}, "no driver").reason("GPU-0") == "no driver"


def test_with_all_hooks_disabled_libraries_are_bound_where_they_are_found():
    settings = settings_of(cdi_disable_hooks=("all",), nvidia_cdi_hook_path="/usr/bin/nvidia-ctk")
    assert cdi_options(settings, Access(dev_root="/")).hook == ""
    assert ignored_options(settings) == []


def test_nvidias_other_hooks_may_be_disabled():
    disabled = ("chmod", "update-application-profile")
    assert ignored_options(settings_of(cdi_disable_hooks=disabled, nvidia_cdi_hook_path="/x")) == []
