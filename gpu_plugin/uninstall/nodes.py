"""Has the pods of a DaemonSet clean their nodes up before it is deleted."""

from collections.abc import Callable

import anyio

from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.daemonset import DaemonSet
from gpu_plugin.uninstall.template import cleanup_patch, progress

BETWEEN = 1.0
"""Seconds between two looks at how far it is."""


async def clean(
    daemonset: DaemonSet, timeout: float, say: Callable[[str], object], between: float = BETWEEN
) -> tuple[int, int]:
    """Has every node of the DaemonSet cleaned up, waiting up to `timeout` seconds. Gives how many were, and how many there are.

    `say` is told of each step. An API server that fails in between is asked again until the time is up.

    Raises:
        UnreachableError: the DaemonSet could not be read or changed in the first place.
        ForeignDaemonSetError: it does not run gpu-plugin.
    """
    found = await daemonset.read()
    if found is None:
        say("there is no such DaemonSet: nothing to clean up")
        return 0, 0
    await daemonset.patch(cleanup_patch(found))
    done = (0, int((found.get("status") or {}).get("desiredNumberScheduled", 0)))
    say(f"cleaning up {_nodes(done[1])}")
    with anyio.move_on_after(timeout):
        while True:
            try:
                now = await daemonset.read()
            except UnreachableError as error:
                say(f"asking again: {error}")
            else:
                if now is None:
                    say("the DaemonSet was deleted meanwhile")
                    return done
                seen = progress(now)
                if seen is not None and seen != done:
                    done = seen
                    say(f"{done[0]} of {_nodes(done[1])} {'is' if done[1] == 1 else 'are'} clean")
                if seen is not None and done[0] == done[1]:
                    return done
            await anyio.sleep(between)
    return done


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
