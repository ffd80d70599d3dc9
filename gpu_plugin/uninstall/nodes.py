"""Deletes a DaemonSet and has its nodes cleaned up by the pods of another one, which is deleted in the end."""

from collections.abc import Callable, Mapping
from typing import Any

import anyio

from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.daemonset import DaemonSets
from gpu_plugin.uninstall.template import cleanup_daemonset, cleanup_name, progress

BETWEEN = 1.0
"""Seconds between two looks at how far it is."""

LAST = 30.0
"""Seconds for the end of all pods."""


async def clean(
    daemonsets: DaemonSets,
    name: str,
    timeout: float,
    say: Callable[[str], object],
    owner: Mapping[str, Any] | None = None,
    between: float = BETWEEN,
) -> tuple[int, int]:
    """Uninstalls the DaemonSet of this name, and gives how many of its nodes were cleaned up, and how many there are.

    `say` is told of each step. It takes up to `timeout` seconds, and `LAST` more. What cleans up is made before the DaemonSet is
    deleted, and waits on each node for its pod to end: an attempt that is broken off is gone on with by the next. An API server
    that fails in between is asked again.

    Raises:
        UnreachableError: the DaemonSet could not be read, followed by another one, or deleted.
        ForeignDaemonSetError: it does not run gpu-plugin; nothing was changed.
    """
    found = await daemonsets.read(name)
    if found is not None:
        await daemonsets.create(cleanup_daemonset(found, owner))  # one of an earlier attempt does as well
        await daemonsets.delete(name)
    elif await daemonsets.read(cleanup_name(name)) is None:
        say("there is no such DaemonSet: nothing to clean up")
        return 0, 0
    done = (0, int(((found or {}).get("status") or {}).get("desiredNumberScheduled", 0)))
    say(f"deleted; cleaning up {_nodes(done[1])}")
    try:
        with anyio.move_on_after(timeout):
            while True:
                now = await _read(daemonsets, cleanup_name(name), say)
                if now is None:
                    say(f"{cleanup_name(name)} was deleted meanwhile")
                    return done
                seen = progress(now)
                if seen is not None and seen != done:
                    done = seen
                    say(f"{done[0]} of {_nodes(done[1])} {'is' if done[1] == 1 else 'are'} clean")
                if seen is not None and done[0] >= done[1]:
                    break
                await anyio.sleep(between)
    finally:
        with anyio.move_on_after(LAST, shield=True):
            await daemonsets.delete(cleanup_name(name))
            await _gone(daemonsets, name, say, between)
            await _gone(daemonsets, cleanup_name(name), say, between)
    return done


async def _gone(daemonsets: DaemonSets, name: str, say: Callable[[str], object], between: float) -> None:
    while await _read(daemonsets, name, say) is not None:  # noqa: ASYNC110 - what ends it is elsewhere
        await anyio.sleep(between)


async def _read(daemonsets: DaemonSets, name: str, say: Callable[[str], object]) -> Mapping[str, Any] | None:
    """The DaemonSet, asked for until there is an answer."""
    while True:
        try:
            return await daemonsets.read(name)
        except UnreachableError as error:
            say(f"asking again: {error}")
            await anyio.sleep(BETWEEN)


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
