"""Delete a DaemonSet, and clean up its nodes by the pods of another DaemonSet, which is deleted in the end."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import anyio
import click
import yaml

from gpu_plugin.cluster.connection import WHOLE, Connection, UnreachableError
from gpu_plugin.config.words import are, counted

POLL_INTERVAL = 1.0  # seconds between two reads of the progress
END_TIMEOUT = 30.0  # seconds for the end of all pods

# The annotation of a DaemonSet with the DaemonSet that cleans up after it (helm/gpu-plugin/templates/_cleanup.tpl),
# and the label of the latter with its own name
CLEANUP = "gpu-plugin/cleanup"

# Annotations of every object that Helm installs, except hooks (helm.sh/helm, pkg/action/validate.go)
_OF_HELM = ("meta.helm.sh/release-namespace", "meta.helm.sh/release-name")

Object = Mapping[str, Any]  # a Kubernetes object, or a part of it, in the form of JSON


class DaemonSets:
    """The DaemonSets of a namespace in the Kubernetes API. Every method raises UnreachableError."""

    def __init__(self, server: Connection, namespace: str) -> None:
        self._server = server
        self._path = f"/apis/apps/v1/namespaces/{namespace}/daemonsets"

    async def read(self, name: str) -> Object | None:
        """Return the object; None if no DaemonSet has this name."""
        return await self._ask("GET", f"/{name}")

    async def read_patiently(self, name: str, named: str) -> Object | None:
        """Read the object, and repeat that until there is an answer. The line of each failure begins with `named`."""
        while True:
            try:
                return await self.read(name)
            except UnreachableError as error:
                click.echo(f"{named}: asking again: {error}")
                await anyio.sleep(POLL_INTERVAL)

    async def create(self, content: Object) -> bool:
        """Create a DaemonSet. Returns False if a DaemonSet of this name exists."""
        return await self._ask("POST", "", content, but=HTTPStatus.CONFLICT) is not None

    async def delete(self, name: str) -> None:
        """Delete a DaemonSet with its pods. The object exists until its last pod is gone."""
        await self._ask("DELETE", f"/{name}", {"propagationPolicy": "Foreground"})

    async def _ask(
        self, method: str, path: str, content: Object | None = None, but: int = HTTPStatus.NOT_FOUND
    ) -> Object | None:
        """Return the answer; None if its HTTP status is `but`."""
        try:
            return await self._server.ask(method, f"{self._path}{path}", dict[str, Any], content, WHOLE)
        except UnreachableError as error:
            if error.code != but:
                raise
            return None


class ForeignDaemonSetError(ValueError):
    """The DaemonSet cannot be uninstalled, because the chart did not make it; the text says why."""


async def clean(
    daemonsets: DaemonSets,
    name: str,
    timeout: float,
    named: str,
    owner: Object | None = None,
    helm_release: str | None = None,
) -> tuple[int, int]:
    """Uninstall the DaemonSet of this name. Return the number of nodes that were cleaned up, and the number of all its nodes.

    The line of each step begins with `named`. It takes up to `timeout` seconds, and up to `END_TIMEOUT` more. The DaemonSet that
    cleans up is created before the other is deleted, and its pods wait on each node for the other's pod to end: if the process is
    killed, the next attempt continues. If it is cancelled or fails, it restores the DaemonSet. Failed reads from the API server
    are repeated. With `helm_release`, NAMESPACE/NAME, nothing is changed unless Helm installed the DaemonSet as this release.

    Raises:
        UnreachableError: the DaemonSet could not be read or deleted, or its cleanup DaemonSet could not be created.
        ForeignDaemonSetError: the DaemonSet has no annotation CLEANUP, or another program's DaemonSet has the name of its cleanup
            DaemonSet; nothing was changed.
    """
    cleaner = cleanup_name(name)
    found, left = await daemonsets.read(name), await daemonsets.read(cleaner)
    present = found or left
    if present is None:
        click.echo(
            f"{named}: there is no such DaemonSet: nothing to clean up (after an attempt that was killed: gpu-plugin cleanup, "
            "on each node)"
        )
        return 0, 0
    if helm_release is not None and helm_release != "/".join(_of_helm(present).values()):
        click.echo(
            f"{named}: not installed by the Helm release {helm_release}: nothing was changed. To leave this Job out, render the "
            "chart with --no-hooks"
        )
        return 0, 0
    if left is not None and (left["metadata"].get("labels") or {}).get(CLEANUP) != cleaner:
        raise ForeignDaemonSetError(f"there is a DaemonSet {cleaner} that is not ours: rename or delete it")
    cleaning = None if found is None else cleanup_daemonset(found, owner)
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
                now = await daemonsets.read_patiently(cleaner, named)
                if now is None:
                    click.echo(f"{named}: {cleaner} was deleted by another program")
                    break
                seen = _progress(now)
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
            for each in (name, cleaner) if deleted else (cleaner,):
                while await daemonsets.read_patiently(each, named) is not None:  # noqa: ASYNC110 - the API server has no event for it
                    await anyio.sleep(POLL_INTERVAL)
            if deleted and not ended and found is not None and await daemonsets.create(_restored(found)):
                click.echo(f"{named}: interrupted: the DaemonSet is restored")
    return done


def cleanup_name(name: str) -> str:
    """Return the name of the DaemonSet that cleans up after the DaemonSet of this name; short enough for a label."""
    return f"{name[:55].rstrip('-._')}-cleanup"


def cleanup_daemonset(daemonset: Object, owner: Object | None = None) -> dict[str, Any]:
    """Return the DaemonSet that cleans up after `daemonset`. It is deleted with `owner`, a reference to an object, if given.

    Raises:
        ForeignDaemonSetError: `daemonset` has no such annotation, or one of another namespace or name.
    """
    metadata = daemonset["metadata"]
    try:
        made = yaml.safe_load((metadata.get("annotations") or {})[CLEANUP])
        fits = made["metadata"]["name"] == cleanup_name(metadata["name"])
        fits = fits and made["metadata"]["namespace"] == metadata["namespace"]
    except (KeyError, TypeError, yaml.YAMLError):
        fits = False
    if not fits:
        raise ForeignDaemonSetError(
            f"it has no annotation {CLEANUP} for its namespace and name, as the DaemonSets of the chart and of deploy/ have: add "
            "it, or delete the DaemonSet and run gpu-plugin cleanup on its nodes"
        )
    own: dict[str, Any] = dict(made)
    own["metadata"]["annotations"] = _of_helm(daemonset)  # so that the next attempt for this Helm release recognizes it
    if owner is not None:
        own["metadata"]["ownerReferences"] = [owner]
    return own


def _of_helm(daemonset: Object) -> dict[str, str]:
    """Return Helm's own annotations of a DaemonSet: the namespace and the name of the release."""
    annotations = daemonset["metadata"].get("annotations") or {}
    return {key: annotations[key] for key in _OF_HELM if key in annotations}


def _restored(daemonset: Object) -> dict[str, Any]:
    """Return the DaemonSet for creating it again, without the fields that the API server added."""
    kept = ("name", "namespace", "labels", "annotations")
    metadata = {key: value for key, value in daemonset["metadata"].items() if key in kept}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": daemonset["spec"]}


def _progress(daemonset: Object) -> tuple[int, int] | None:
    """Return the numbers of clean nodes and of all nodes; None until the controller has processed the DaemonSet."""
    status = daemonset.get("status") or {}
    if int(status.get("observedGeneration", 0)) < int(daemonset.get("metadata", {}).get("generation", 1)):
        return None
    return int(status.get("numberReady", 0)), int(status.get("desiredNumberScheduled", 0))
