"""Chooses the platform of a node from the files found there. Does no I/O of its own."""

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

AUTO = "auto"

# Parts of the NVML names of GPUs that are integrated into a Tegra chip (go-nvlib, pkg/nvlib/info)
INTEGRATED = ("(nvgpu)", "NVIDIA Thor")


class Platform(StrEnum):
    """How GPUs are found. The values are those of --device-discovery-strategy, which has no value for WSL."""

    NVML = "nvml"
    WSL = "wsl"
    TEGRA = "tegra"


class Traces(msgspec.Struct, frozen=True):
    """Files that show the platform of a node, each as a path; empty if it does not exist.

    `dxcore` is the library through which Linux uses a Windows host's GPUs, and `dxg` is its device. `tegra` is a file that
    only Tegra systems have.
    """

    dxcore: str = ""
    dxg: str = ""
    tegra: str = ""


class Choice(msgspec.Struct, frozen=True):
    """A platform, and the reason for choosing it."""

    platform: Platform
    reason: str


def choose(strategy: str, traces: Traces, models: Callable[[], Sequence[str] | None]) -> Choice:
    """Choose the platform of a node by the rules of NVIDIA's plugin (go-nvlib, pkg/nvlib/info/resolver.go).

    WSL takes precedence over all but an explicit Tegra, since NVML's names of its GPUs are of no use there. Unlike in NVIDIA's
    plugin, the library alone does not make a node WSL, since it reaches no GPU without /dev/dxg. Library and device together
    do not prove that there is an NVIDIA GPU: the WSL driver asks NVML when it is opened.

    `strategy` is AUTO or the platform that the operator chose. `models` returns the names of NVML's GPUs, or None without an
    NVML library; it is called only if the result matters.
    """
    if strategy == Platform.TEGRA:
        return Choice(Platform.TEGRA, "set by --device-discovery-strategy")
    if traces.dxcore and traces.dxg:
        return Choice(Platform.WSL, f"{traces.dxcore} and {traces.dxg} exist")
    if strategy != AUTO:
        return Choice(Platform.NVML, "set by --device-discovery-strategy")
    known = models()
    if known is None:
        if traces.tegra:
            return Choice(Platform.TEGRA, f"{traces.tegra} exists and there is no NVML library")
        return Choice(Platform.NVML, "no file shows another platform, and there is no NVML library")
    integrated = next((name for name in known if any(part in name for part in INTEGRATED)), "")
    if integrated:
        return Choice(Platform.TEGRA, f"NVML knows an integrated GPU, {integrated}")
    return Choice(Platform.NVML, "there is an NVML library")
