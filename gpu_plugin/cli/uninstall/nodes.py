"""Delete a DaemonSet, and clean up its nodes by the pods of another DaemonSet, which is deleted in the end."""

from collections.abc import Mapping
from typing import Any

import anyio
import click

from gpu_plugin.cli.uninstall import template
from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.daemonset import DaemonSets
from gpu_plugin.config.words import are, counted

POLL_INTERVAL = 1.0  # seconds between two reads of the progress

END_TIMEOUT = 30.0  # seconds for the end of all pods


async def clean(
    daemonsets: DaemonSets,
    name: str,
    timeout: float,
    named: str,
    owner: Mapping[str, Any] | None = None,
    release: template.HelmRelease | None = None,
) -> tuple[int, int]:
    """Uninstall the DaemonSet of this name. Return the number of nodes that were cleaned up, and the number of all its nodes.

    The line of each step begins with `named`. It takes up to `timeout` seconds, and up to `END_TIMEOUT` more. The DaemonSet that
    cleans up is created before the other is deleted, and its pods wait on each node for the other's pod to end: if the process is
    killed, the next attempt continues. If it is cancelled or fails, it restores the DaemonSet. Failed reads from the API server
    are repeated. With `release`, nothing is changed unless Helm installed the DaemonSet as that release.

    Raises:
        UnreachableError: the DaemonSet could not be read or deleted, or its cleanup DaemonSet could not be created.
        ForeignDaemonSetError: it does not run gpu-plugin, or a foreign DaemonSet has the name of its cleanup DaemonSet; nothing
            was changed.
    """
    cleaner = template.cleanup_name(name)
    found, left = await daemonsets.read(name), await daemonsets.read(cleaner)
    present = found or left
    if release is not None and present is not None and not release.installed(present):
        click.echo(
            f"{named}: not installed by the Helm release {release.namespace}/{release.name}: nothing was changed. "
            "To leave this Job out, render the chart with --no-hooks"
        )
        return 0, 0
    if left is not None and not template.made_here(left):
        raise template.ForeignDaemonSetError(f"there is a DaemonSet {cleaner} that is not ours: rename or delete it")
    if found is None and left is None:
        click.echo(
            f"{named}: there is no such DaemonSet: nothing to clean up (after an attempt that was killed: gpu-plugin cleanup, "
            "on each node)"
        )
        return 0, 0
    cleaning = None if found is None else template.cleanup_daemonset(found, owner)
    done = (0, int(((found or {}).get("status") or {}).get("desiredNumberScheduled", 0)))
    deleted = ended = False
    try:
        if cleaning is not None:
            await daemonsets.create(cleaning)
            deleted = True  # set before the request, which may fail after the deletion
            await daemonsets.delete(name)
        click.echo(f"{named}: deleted; cleaning up {counted(done[1], 'node')}")
        with anyio.move_on_after(timeout):
            while True:
                now = await _read(daemonsets, cleaner, named)
                if now is None:
                    click.echo(f"{named}: {cleaner} was deleted by another program")
                    break
                seen = template.progress(now)
                if seen is not None and seen != done:
                    done = seen
                    click.echo(f"{named}: {done[0]} of {counted(done[1], 'node')} {are(done[1])} clean")
                if seen is not None and done[0] >= done[1]:
                    break
                await anyio.sleep(POLL_INTERVAL)
        ended = True
    finally:
        with anyio.move_on_after(END_TIMEOUT, shield=True):
            await daemonsets.delete(cleaner)
            if deleted:
                await _gone(daemonsets, name, named)
            await _gone(daemonsets, cleaner, named)
            if deleted and not ended and found is not None and await daemonsets.create(template.restored(found)):
                click.echo(f"{named}: interrupted: the DaemonSet is restored")
    return done


async def _gone(daemonsets: DaemonSets, name: str, named: str) -> None:
    while await _read(daemonsets, name, named) is not None:  # noqa: ASYNC110 - the API server has no event for it
        await anyio.sleep(POLL_INTERVAL)


async def _read(daemonsets: DaemonSets, name: str, named: str) -> Mapping[str, Any] | None:
    """Read the DaemonSet, and repeat that until there is an answer."""
    while True:
        try:
            return await daemonsets.read(name)
        except UnreachableError as error:
            click.echo(f"{named}: asking again: {error}")
            await anyio.sleep(POLL_INTERVAL)
