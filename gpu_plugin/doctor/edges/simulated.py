"""A simulated node as a daemon keeps it, looked at without changing what that daemon remembers."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_plugin.config.settings import Settings
from gpu_plugin.hardware import Hardware


@contextmanager
def simulated(settings: Settings) -> Iterator[Hardware]:
    """The node of `--simulate`, with the faults that the state directory remembers. Raises ConfigError for one that cannot be."""
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415 - only who simulates needs it
    from gpu_plugin.simulation.hardware import STATE_FILE, SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    profile = load(settings.simulate)
    with TemporaryDirectory(prefix="gpu-plugin-doctor-") as copy:
        with suppress(OSError):  # none is remembered, or none that we may read
            shutil.copyfile(Path(settings.state_dir, STATE_FILE), Path(copy, STATE_FILE))
        node = SimulatedNode(profile, Path(copy))
        yield Hardware(SimulatedDriver(node), SimulatedHost(node), "", library=lambda: "simulated")
