"""Which rights in the Kubernetes API the settings need. Pure; docs/security.md has the same as a table."""

from collections.abc import Iterator

from gpu_plugin.config.settings import Settings
from gpu_plugin.doctor.facts import Right


def needed(settings: Settings) -> tuple[Right, ...]:
    """Every right once, with the first option that needs it."""
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
