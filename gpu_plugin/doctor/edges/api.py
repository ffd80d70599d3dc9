"""Reachability of the Kubernetes API, and this process's rights on it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpu_plugin.config.settings import Settings
from gpu_plugin.doctor.facts import Api, Right


async def rights(kubeconfig: str, asked: Sequence[Right], clock: Callable[[], float]) -> Api:
    """Return the API server's answer about these rights (SelfSubjectAccessReview, which the server does not store)."""
    from gpu_plugin.cluster.access_review import review  # noqa: PLC0415 - only where an option needs the API
    from gpu_plugin.cluster.connection import UnreachableError, require_client  # noqa: PLC0415
    from gpu_plugin.config.errors import ConfigError  # noqa: PLC0415
    from gpu_plugin.daemon.config_source import MAX_KUBECONFIG  # noqa: PLC0415
    from gpu_plugin.runtime.regular_file import require_file  # noqa: PLC0415

    began = clock()
    if kubeconfig:
        try:
            require_file(Path(kubeconfig), MAX_KUBECONFIG)
        except OSError as error:
            return Api(tuple(asked), seconds=clock() - began, trouble=f"--kubeconfig {kubeconfig}: {error.strerror}")
    try:
        require_client(asked[0].needed_by, "")
        server, allowed = await review(
            kubeconfig, [(each.verb, each.resource, each.subresource, each.namespace, each.name) for each in asked]
        )
    except (UnreachableError, ConfigError) as error:
        return Api(tuple(asked), seconds=clock() - began, trouble=str(error))
    missing = tuple(right for right, may in zip(asked, allowed, strict=True) if not may)
    return Api(tuple(asked), server, clock() - began, missing)


def needed(settings: Settings) -> tuple[Right, ...]:
    """Return every right that these settings need, once, with the first option that needs it. docs/security.md lists them."""
    found: dict[tuple[str, ...], Right] = {}
    for right in _needed(settings):
        found.setdefault((right.verb, right.resource, right.subresource, right.namespace), right)
    return tuple(found.values())


def _needed(settings: Settings) -> Iterator[Right]:
    node = settings.node_name
    if settings.config_file_srcdir:
        yield from (Right(verb, "nodes", "--config-file-srcdir", name=node) for verb in ("get", "watch"))
    if settings.node_events:
        yield from (Right(verb, "events", "--node-events", namespace="default") for verb in ("create", "patch"))
    if settings.pod_events:
        yield from (Right(verb, "events", "--pod-events") for verb in ("create", "patch"))
        yield Right("get", "pods", "--pod-events")
    if settings.node_condition:
        yield Right("get", "nodes", "--node-condition", name=node)
        yield Right("patch", "nodes", "--node-condition", subresource="status", name=node)
    if settings.node_taint != "none":
        yield from (Right(verb, "nodes", "--node-taint", name=node) for verb in ("get", "patch"))
    if settings.cordon_annotation:
        yield from (Right(verb, "nodes", "--cordon-annotation", name=node) for verb in ("get", "watch"))
    if settings.node_labels == "api":
        yield from (Right(verb, "nodes", "--node-labels", name=node) for verb in ("get", "patch"))
