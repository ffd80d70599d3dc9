"""A simulated node as its daemon keeps it, looked at without changing what that daemon remembers."""

import time
from pathlib import Path

import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon.hardware import Hardware


def simulated(settings: Settings) -> Hardware:
    """The node of `--simulate`, with the faults that the state directory remembers. Raises ConfigError for one that cannot be."""
    from gpu_plugin.simulation import saved  # noqa: PLC0415 - only who simulates needs it
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415
    from gpu_plugin.simulation.hardware import STATE_FILE, SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    profile = load(settings.simulate)
    node = SimulatedNode(profile)  # without a directory, so that it writes nothing
    kept = saved.read(Path(settings.state_dir, STATE_FILE), profile)
    if kept is not None:
        node.boot_id = kept.boot_id
    for index, was in enumerate(kept.gpus if kept else ()):
        if was.mig is not msgspec.UNSET and profile.gpus[index].mig_profiles is not None:
            node.partition(index, was.mig)
        hung = None if was.hung_until is None else time.monotonic() + was.hung_until - time.time()
        node.change(index, **msgspec.structs.asdict(was.condition(hung)))
    return Hardware(SimulatedDriver(node), SimulatedHost(node), "", library=lambda: "simulated")
