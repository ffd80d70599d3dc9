"""`gpu-plugin fault`: makes a GPU of a running simulated node fail, or repairs it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpu_plugin.cli.running_daemon import ask, state_dir_option
from gpu_plugin.devices.gpu_names import HOW

_NODE_FLAGS = ("reboot", "init-error")  # flags that concern the whole node

# Faults by flag. A flag without a type or a metavar takes no value.
_FLAGS: dict[str, dict[str, Any]] = {
    "xid": {"type": int, "help": "Raise this Xid, from 1 to 999."},
    "event": {"metavar": "TYPE", "help": "Send a driver event of this type, such as 0x800."},
    "temperature": {"type": int, "metavar": "CELSIUS", "help": "Hold this temperature, °C."},
    "memory-temperature": {"type": int, "metavar": "CELSIUS", "help": "Hold this temperature of the memory, °C."},
    "margin": {
        "type": int,
        "metavar": "CELSIUS",
        "help": "Keep this margin to the temperature limit, °C (negative: beyond it).",
    },
    "clocks-event-reasons": {"metavar": "MASK", "help": "Report this mask of clocks event reasons, such as 0x40."},
    "ecc-uncorrected": {"type": int, "metavar": "N", "help": "Add N uncorrected memory errors."},
    "ecc-cleared": {"help": "Set the count of memory errors to 0 without a reset, as nvidia-smi -p 0 does."},
    "energy-dip": {
        "type": int,
        "metavar": "MJ",
        "help": "Report this many mJ less energy at the next reading than at the last.",
    },
    "persistence-mode": {
        "type": click.Choice(["on", "off"]),
        "help": "Whether counters outlive the last process that has the driver open.",
    },
    "remap-pending": {"help": "A memory row waits to be remapped."},
    "remap-failure": {"help": "A memory row could not be remapped."},
    "retired-pages": {"type": int, "metavar": "N", "help": "Have N memory pages retired in all."},
    "retirement-pending": {"help": "A memory page waits to be retired."},
    "sram-threshold": {"help": "The SRAM's error count is over its threshold."},
    "unrepairable-memory": {"help": "Memory errors that cannot be repaired."},
    "recovery-action": {
        "type": click.Choice(
            [
                "none",
                "gpu-reset",
                "node-reboot",
                "drain-p2p",
                "drain-and-reset",
                "recover-imex-domain",
                "bus-reset",
                "system-reboot",
            ]
        ),
        "help": "The driver's request; none also keeps later Xids from changing it.",
    },
    "nvlink-down": {"type": int, "metavar": "LINK", "help": "Take this NVLink down."},
    "nvlink-up": {"type": int, "metavar": "LINK", "help": "Undo --nvlink-down of this link."},
    "nvlink-errors": {"type": int, "metavar": "N", "help": "Add N failed recoveries of NVLinks."},
    "nvlink-crc-errors": {"type": int, "metavar": "N", "help": "Add N CRC errors on NVLinks."},
    "fabric": {
        "type": click.Choice(["completed", "in-progress", "unhealthy", "limited"]),
        "help": "State of the NVLink fabric.",
    },
    "topology": {
        "type": click.Choice(["readable", "unreadable", "unknown"]),
        "help": "Whether NVML reports its place on PCIe; unknown: nor does sysfs. Takes effect when links are read next.",
    },
    "pcie-width": {"type": int, "metavar": "N", "help": "Use N lanes of the PCIe link."},
    "pcie-replays": {"type": int, "metavar": "N", "help": "Add N replays on the PCIe link."},
    "pcie-fatal-errors": {"type": int, "metavar": "N", "help": "Add N fatal errors on the PCIe link."},
    "lost": {"help": "Fall off the bus."},
    "vanish": {"help": "Vanish: the driver is unbound from the GPU."},
    "return": {"help": "Undo --vanish; takes effect when the driver is opened next."},
    "hang": {"type": float, "metavar": "SECONDS", "help": "Block every driver call for this long."},
    "slow": {"type": float, "metavar": "SECONDS", "help": "Make every driver call take this long."},
    "error": {
        "type": int,
        "metavar": "CODE",
        "help": "Every driver call fails with this nvmlReturn_t, such as 999; 0: none does.",
    },
    "mig": {
        "metavar": "PROFILES",
        "help": "Partition it into these MIG devices, such as 3g.20gb,1c.3g.20gb,1g.5gb+me; empty: no device; none: no MIG mode.",
    },
    "reset": {"help": "What a GPU reset does: counters begin at 0, what waited for one is done, nothing is asked for."},
    "heal": {"help": "Repair and reset: everything but --mig is over."},
    "reset-keeping-energy": {"help": "--reset, but the energy counter counts on, as where the driver stays loaded."},
    "reboot": {"help": "Reboot the node: every GPU is reset and back on the bus. Needs no --gpu."},
    "init-error": {
        "type": int,
        "metavar": "CODE",
        "help": "Fail each opening of the driver with this nvmlReturn_t, such as 999. Needs no --gpu.",
    },
}

_NUMBERS = ("event", "clocks-event-reasons")  # flags whose value may be written as 0x40


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for name, how in reversed(_FLAGS.items()):
        flag: dict[str, Any] = {"is_flag": True, "default": None} if how.keys() == {"help"} else {}
        function = click.option(f"--{name}", **how, **flag)(function)
    return function


@click.command(
    "fault",
    help="Make a GPU of a running simulated node fail, heal it, or repartition it. The daemon must run with --simulate.",
    epilog="Faults outlive the daemon. --reset ends hangs, memory errors, what waits for a reset, recovery actions, NVLink and "
    "fabric faults, counts of PCIe errors; --reboot also --lost, --vanish and --error; temperatures, margins, clocks, "
    "--topology, --pcie-width, --remap-failure, --retired-pages, --sram-threshold, --unrepairable-memory, --slow and "
    "--persistence-mode end only with --heal; --mig only with another --mig. --init-error and --energy-dip end with "
    "the daemon.",
)
@state_dir_option
@click.option("--gpu", metavar="GPU", help=f"Which GPU: {HOW}.")
@_options
@click.option("--instance", metavar="GI[/CI]", help="With --xid: only on this GPU instance, or compute instance of it.")
@click.option(
    "--times", type=int, metavar="N", help="With --init-error: this many times, not for as long as the daemon runs."
)
def command(
    state_dir: Path, gpu: str | None, instance: str | None, times: int | None, **faults: float | str | bool | None
) -> None:
    """Send a fault to the daemon and print the result."""
    asked: dict[str, object] = {name: given for name in _FLAGS if (given := faults[name.replace("-", "_")]) is not None}
    if len(asked) != 1:
        flags = ", ".join(f"--{name}" for name in _FLAGS)
        given = " and ".join(f"--{name}" for name in asked) or "none"
        raise click.UsageError(f"one fault at a time, of {flags}: {given} given")
    (name,) = asked
    if name in _NUMBERS:
        asked[name] = _number(name, str(asked[name]))
    if instance is not None:
        if name != "xid":
            raise click.UsageError(f"--instance goes with --xid, not with --{name}")
        asked["instance"] = instance
    if times is not None:
        if name != "init-error":
            raise click.UsageError(f"--times goes with --init-error, not with --{name}")
        asked["times"] = times
    if gpu is None and name not in _NODE_FLAGS:
        raise click.UsageError("--gpu is missing: which GPU, by its index, its uuid or its PCI bus id")
    real = click.ClickException("the daemon runs on real GPUs: only a daemon with --simulate accepts faults")
    click.echo(ask(state_dir, "fault", gpu, asked, unknown_verb=real)["done"])


def _number(name: str, text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise click.UsageError(f"--{name}: {text!r} is not a number such as 64 or 0x40") from None
