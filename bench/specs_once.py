"""`python -m bench.specs_once DIRECTORY`: builds and writes CDI specifications for the first time, then checks for changes.

Prints the milliseconds of the first time and of each check, and how often files were searched and written.
"""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml.port import Driver

LOOKS = 200


def main(directory: Path) -> None:
    """Measure in this new process, so that imports and empty caches count."""
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415 - a daemon has imported these before
    from gpu_plugin.simulation.hardware import SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    node = SimulatedNode(load(str(directory / "node.yaml")))
    gpus = _probed(SimulatedDriver(node), SimulatedHost(node))
    began = time.perf_counter()
    from gpu_plugin.containers.cdi.options import CdiOptions  # noqa: PLC0415 - the daemon also imports these late
    from gpu_plugin.containers.cdi_files.directory import SpecDirectory  # noqa: PLC0415
    from gpu_plugin.containers.cdi_files.source import Request, SpecSource  # noqa: PLC0415
    from gpu_plugin.containers.driver_root.search import Search  # noqa: PLC0415

    root = str(directory / "driver")
    source = SpecSource(SimulatedHost(node), lambda: ((root, ""),))
    written = SpecDirectory(directory / "cdi")
    request = Request(gpus, node.profile.driver_version, CdiOptions())
    built = source.build(request)
    names = written.write(built.specs).changed
    first = time.perf_counter() - began
    assert names, built.trouble
    assert not built.trouble, built.trouble
    looks, rewritten = [], 0
    calls = counting()
    for _ in range(LOOKS):
        began = time.perf_counter()
        rewritten += len(written.write(source.build(request).specs).changed)
        looks.append((time.perf_counter() - began) * 1000)
    (spec,) = built.specs.values()
    print(
        json.dumps(
            {
                "first_ms": first * 1000,
                "looks_ms": looks,
                "searches": source._searches[Search].searches,
                "rewritten": rewritten,
                "calls": sum(calls.values()) / LOOKS,
                "devices": len(spec.devices),
                "mounts": len(spec.container_edits.mounts),
                "bytes": (directory / "cdi" / names[0]).stat().st_size,
            }
        )
    )


def counting() -> Counter[str]:
    """Return a counter of all later calls that read the file system, by name."""
    counts: Counter[str] = Counter()
    for name in ("stat", "lstat", "readlink", "scandir", "listdir", "open"):
        asked = getattr(os, name)

        def counted(*arguments: Any, name: str = name, asked: Any = asked, **named: Any) -> Any:
            counts[name] += 1
            return asked(*arguments, **named)

        setattr(os, name, counted)
    return counts


def _probed(driver: Driver, host: HostView) -> tuple[Gpu, ...]:
    from gpu_plugin.nvml.traits import probe_gpu  # noqa: PLC0415

    driver.open()
    return tuple(probe_gpu(driver, host, index)[1] for index in range(driver.device_count()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
