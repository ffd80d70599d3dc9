"""The demo: typical events for the daemon on a simulated 8-GPU node, in a few seconds.

The daemon is the real daemon in a process of its own. Its node and its kubelet are simulated. The demo ends with an error if a
step does not happen.
"""

import asyncio
import signal
import tempfile
import time
from pathlib import Path
from typing import Final, TextIO

from demo import scenario
from demo.daemon_process import daemon_process
from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.simulation.profile import load

PROFILE = "hgx-h100"
GENERATION: Final = "1.36"
NUMA_POLICY: Final = "best-effort"

# Longest path of the temporary directory's parent, in characters: a socket's path may have only 107 bytes
LONGEST_TEMPORARY = 50


async def play(out: TextIO) -> int:
    """Play the demo and write it to `out`. Return the exit status: 0 if all steps happened and no rule was broken."""
    timeline, profile = scenario.Timeline(out), load(PROFILE)
    parent = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="gpd-", dir=parent if len(parent) <= LONGEST_TEMPORARY else "/tmp") as made:  # noqa: S108
        directory, state = Path(made), Path(made) / "state"
        flags = {
            "simulate": PROFILE,
            "device-plugin-dir": directory,
            "state-dir": state,
            "health-poll-interval": scenario.HEALTH_POLL,
            "temperature-recovery": scenario.TEMPERATURE_RECOVERY,
        }
        timeline.say(
            "The real gpu-plugin daemon, in a process of its own, on a simulated node under a stand-in kubelet."
        )
        models = " and ".join(sorted({gpu.name for gpu in profile.gpus}))
        nodes = len({gpu.numa_node for gpu in profile.gpus})
        timeline.say(
            f"Node {profile.name}: {len(profile.gpus)} x {models} on {nodes} NUMA nodes. "
            f"The kubelet has the rules of {GENERATION}, NUMA policy {NUMA_POLICY}."
        )
        timeline.say(
            f"Simulated: the driver and the kubelet. Real: the daemon, its sockets in {directory}, every number."
        )
        timeline.say()
        timeline.say("    at         took  what", scenario.DIM)
        async with StandInKubelet(directory, generation=GENERATION, numa_policy=NUMA_POLICY) as kubelet:
            started = time.perf_counter()
            async with daemon_process(flags, kubelet.wake) as daemon:
                try:
                    await scenario.Scenario(timeline, kubelet, daemon, profile, state).play(started)
                    kubelet.check()
                except (scenario.StepFailedError, AssertionError) as error:
                    await daemon.end()
                    timeline.say(f"FAILED after {timeline.elapsed:.2f} s: {error}", scenario.BAD)
                    timeline.say(f"The last {len(daemon.tail)} lines of the daemon's log:")
                    timeline.say("\n".join(daemon.tail) or "(none)")
                    return 1
        timeline.say()
        timeline.say(
            f"All {timeline.steps} steps happened, in {timeline.elapsed:.1f} s. Breaches of the kubelet's contract: "
            f"{len(kubelet.violations)}.",
            scenario.GOOD,
        )
    return 0


def run(out: TextIO) -> int:
    """Run `play` on an event loop of its own. After SIGTERM the daemon is ended too, and the status is 143."""
    return asyncio.run(_until_sigterm(out))


async def _until_sigterm(out: TextIO) -> int:
    playing = asyncio.create_task(play(out))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    await asyncio.wait([playing])
    return 128 + signal.SIGTERM if playing.cancelled() else playing.result()
