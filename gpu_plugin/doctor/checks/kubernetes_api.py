"""Check that the Kubernetes API can be reached, and grants the rights that the enabled options need."""

import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, failed, ok, seen, skipped
from gpu_plugin.doctor.node import Node


class Right(msgspec.Struct, frozen=True):
    """A right on the Kubernetes API, and the option that needs it.

    `namespace` is empty for a resource without a namespace, or for all namespaces.
    """

    verb: str
    resource: str
    needed_by: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return the right as a ClusterRole names it, such as patch on nodes/status."""
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} on {resource}" + (f" in namespace {self.namespace}" if self.namespace else "")


def needed_rights(settings: Settings) -> tuple[Right, ...]:
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


@check("kubernetes-api")
def kubernetes_api(node: Node) -> Finding | list[Finding]:
    """Fail if the API is needed and does not answer, and with each option whose rights are missing."""
    rights = needed_rights(node.settings)
    if not rights:
        return skipped("no enabled option needs it")
    reading = node.known("api", look, node.settings.kubeconfig, rights, seconds=node.driver_patience)
    return seen(reading, "the Kubernetes API", needed=True)


def look(kubeconfig: str, rights: tuple[Right, ...]) -> list[Finding]:
    """Return the findings about these rights, from SelfSubjectAccessReviews, which the API server does not store."""
    from gpu_plugin.cluster.access_review import review  # noqa: PLC0415 - only where an option needs the API
    from gpu_plugin.cluster.connection import UnreachableError, require_client  # noqa: PLC0415
    from gpu_plugin.config.errors import ConfigError  # noqa: PLC0415
    from gpu_plugin.daemon.config_source import MAX_KUBECONFIG  # noqa: PLC0415
    from gpu_plugin.runtime.regular_file import require_file  # noqa: PLC0415

    began = time.monotonic()
    if kubeconfig:
        try:
            require_file(Path(kubeconfig), MAX_KUBECONFIG)
        except OSError as error:
            return [_unreachable(rights, f"--kubeconfig {kubeconfig}: {error.strerror}")]
    try:
        require_client(rights[0].needed_by, "")
        asked = [(each.verb, each.resource, each.subresource, each.namespace, each.name) for each in rights]
        server, allowed = anyio.run(review, kubeconfig, asked)
    except (UnreachableError, ConfigError) as error:
        return [_unreachable(rights, str(error))]
    missing: dict[str, list[str]] = {}
    for right, may in zip(rights, allowed, strict=True):
        if not may:
            missing.setdefault(right.needed_by, []).append(str(right))
    if not missing:
        took = (time.monotonic() - began) * 1000
        return [ok(f"{server} answers in {took:.0f} ms, and allows what is needed")]
    return [
        failed(
            f"{option}: our account may not {', '.join(denied)}",
            "bind it to a ClusterRole that allows it: docs/security.md has the rights of each feature, the chart makes them",
        )
        for option, denied in missing.items()
    ]


def _unreachable(rights: tuple[Right, ...], why: str) -> Finding:
    options = ", ".join(dict.fromkeys(right.needed_by for right in rights))
    return failed(
        f"needed by {options}: {why}",
        "is the API server's address reachable from here (network policies, DNS)? Is the service account mounted, or "
        "--kubeconfig right?",
    )
