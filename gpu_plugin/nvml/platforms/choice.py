"""Which platform a node is, decided from what was found there. Does no I/O of its own."""

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

AUTO = "auto"

INTEGRATED = ("(nvgpu)", "NVIDIA Thor")
"""Parts of the names of GPUs that NVML knows and that are part of a Tegra chip (go-nvlib, pkg/nvlib/info)."""


class Platform(StrEnum):
    """How GPUs are found. The values are those of --device-discovery-strategy, which knows no word for WSL."""

    NVML = "nvml"
    WSL = "wsl"
    TEGRA = "tegra"


class Traces(msgspec.Struct, frozen=True):
    """What a node's files say of it, each as the path that says so; empty where none does.

    `dxcore` is the library through which Linux reaches a Windows host's GPUs, `dxg` the device behind it; `tegra` is a file
    that only a Tegra system has.
    """

    dxcore: str = ""
    dxg: str = ""
    tegra: str = ""


class Choice(msgspec.Struct, frozen=True):
    """A platform, and why it is that one."""

    platform: Platform
    reason: str


def choose(strategy: str, traces: Traces, models: Callable[[], Sequence[str] | None]) -> Choice:
    """The platform of a node, by the rules of NVIDIA's plugin (go-nvlib, pkg/nvlib/info/resolver.go).

    WSL goes before all but an explicit Tegra, since NVML knows its GPUs by names that mean nothing there. The library alone
    does not make a node WSL, unlike with NVIDIA's plugin: without /dev/dxg it reaches no GPU. Nor do both say that a GPU is
    NVIDIA's: the driver for WSL asks NVML for that when it is opened.

    `strategy` is AUTO, or a platform that the operator asks for. `models` gives the names of the GPUs that NVML knows, or None
    where there is no NVML library; it is asked only where the answer could change something.
    """
    if strategy == Platform.TEGRA:
        return Choice(Platform.TEGRA, "--device-discovery-strategy says so")
    if traces.dxcore and traces.dxg:
        return Choice(Platform.WSL, f"{traces.dxcore} and {traces.dxg} exist")
    if strategy != AUTO:
        return Choice(Platform.NVML, "--device-discovery-strategy says so")
    known = models()
    if known is None:
        if traces.tegra:
            return Choice(Platform.TEGRA, f"{traces.tegra} says so and there is no NVML library")
        return Choice(Platform.NVML, "nothing says that it is another, though there is no NVML library")
    integrated = next((name for name in known if any(part in name for part in INTEGRATED)), "")
    if integrated:
        return Choice(Platform.TEGRA, f"NVML knows an integrated GPU, {integrated}")
    return Choice(Platform.NVML, "there is an NVML library")
