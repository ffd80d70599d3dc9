"""The DaemonSet whose pods clean up nodes after the pods of another DaemonSet. Pure."""

import posixpath
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from gpu_plugin.config.places import STATE_DIR

Object = Mapping[str, Any]  # a Kubernetes object, or a part of it, in the form of JSON

CLEANUP = "cleanup"  # the verb, and the name of the init container that runs it

PARENT = "/gpu-plugin-parent"  # the mount point of the parent of the directory to remove

# Fields of the daemon's container that the container with --stay keeps
_KEPT = ("image", "imagePullPolicy", "resources")

_KEPT_FOR_CLEANUP = (*_KEPT, "securityContext", "env", "envFrom")

_NOT_KEPT_OF_A_POD = ("hostNetwork", "hostPID")  # fields of the daemon's pods that the pods that clean up do not have

LABEL = "gpu-plugin/cleanup"  # the label that selects the pods that clean up

# Annotations of every object that Helm installs, except hooks (helm.sh/helm, pkg/action/validate.go)
_RELEASE_NAME, _RELEASE_NAMESPACE = "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"

# The security context of the container with --stay
_NO_RIGHTS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


class ForeignDaemonSetError(ValueError):
    """The DaemonSet does not run gpu-plugin in a known way; the text names the missing part."""


class HelmRelease(msgspec.Struct, frozen=True):
    """A release of the chart, by its namespace and name."""

    namespace: str
    name: str

    def installed(self, daemonset: Object) -> bool:
        """Return True if Helm installed the DaemonSet as this release, or if it cleans up after such a DaemonSet."""
        return _helms(daemonset) == {_RELEASE_NAME: self.name, _RELEASE_NAMESPACE: self.namespace}


def _helms(daemonset: Object) -> dict[str, str]:
    """Return Helm's own annotations of a DaemonSet."""
    annotations = daemonset["metadata"].get("annotations") or {}
    return {key: annotations[key] for key in (_RELEASE_NAME, _RELEASE_NAMESPACE) if key in annotations}


class _Kind(msgspec.Struct, frozen=True):
    """A verb whose pods leave files in a directory of the node: the names of the directory, and the way to clean it up."""

    verb: str
    flag: str
    env: str
    default: str
    mounted_at: str = ""
    cleaning: tuple[str, ...] = ()
    propagation: str = ""
    reports: bool = False
    """True if the verb writes to the Kubernetes API, so that the cleanup needs the pod's token."""


_KINDS = (
    _Kind("run", "--state-dir", "STATE_DIR", STATE_DIR, reports=True),
    # With Bidirectional, the shared memory is unmounted on the node, too
    _Kind("mps", "--mps-root", "MPS_ROOT", "", "/mps", ("--mps",), "Bidirectional"),
)


def cleanup_daemonset(daemonset: Object, owner: Object | None = None) -> dict[str, Any]:
    """Return a DaemonSet for the same nodes whose pods clean up after the pods of the given DaemonSet, and then stay.

    The container of `gpu-plugin run` or `gpu-plugin mps` becomes an init container of the same image, environment, rights and
    volumes that runs `gpu-plugin cleanup` with the same arguments. A pod is Ready once that has succeeded. If the directory to
    remove is a host path, its parent is mounted instead, because a mount point itself cannot be removed.

    Args:
        daemonset: the DaemonSet to uninstall; it is not changed.
        owner: a reference to the object whose deletion deletes the new DaemonSet, or None.

    Raises:
        ForeignDaemonSetError: no container runs `gpu-plugin run` or `gpu-plugin mps`.
    """
    metadata, spec = daemonset["metadata"], daemonset.get("spec", {})
    pod = spec.get("template", {}).get("spec", {})
    container, kind = _daemon(daemonset, pod)
    command, arguments = list(container.get("command") or []), list(container.get("args") or [])
    words = command if kind.verb in command else arguments
    words[words.index(kind.verb)] = CLEANUP
    staying = {key: container[key] for key in _KEPT if key in container} | {"name": container["name"]}
    staying["securityContext"] = _NO_RIGHTS
    stay = [*words[: words.index(CLEANUP) + 1], "--stay"]
    staying |= {"command": stay} if words is command else {"args": stay} | ({"command": command} if command else {})
    volumes, mounts, more = _with_parent(*_needed(pod, container, kind), container, kind)
    cleaning = {key: container[key] for key in _KEPT_FOR_CLEANUP if key in container} | {"name": CLEANUP}
    cleaning |= {"args": [*arguments, *kind.cleaning, "--wait", *more], "volumeMounts": mounts}
    cleaning |= {"command": command} if command else {}
    name = cleanup_name(metadata["name"])
    labels = {LABEL: name}
    made = {"name": name, "namespace": metadata["namespace"], "labels": {**(metadata.get("labels") or {}), **labels}}
    if helms := _helms(daemonset):
        made["annotations"] = helms  # so that the next attempt for this Helm release recognizes it
    dressed = spec.get("template", {}).get("metadata") or {}
    selected = (spec.get("selector") or {}).get("matchLabels") or {}
    more_labels = {key: value for key, value in (dressed.get("labels") or {}).items() if key not in selected}
    kept = {key: value for key, value in pod.items() if key not in _NOT_KEPT_OF_A_POD}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": made | ({"ownerReferences": [owner]} if owner else {}),
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": more_labels | labels, "annotations": dict(dressed.get("annotations") or {})},
                "spec": {
                    **kept,
                    "automountServiceAccountToken": kind.reports and pod.get("automountServiceAccountToken") is True,
                    "initContainers": [cleaning],
                    "containers": [staying],
                    "volumes": volumes,
                },
            },
        },
    }


def cleanup_name(name: str) -> str:
    """Return the name of the DaemonSet that cleans up after the DaemonSet of this name; short enough for a label."""
    return f"{name[: 63 - len(CLEANUP) - 1].rstrip('-._')}-{CLEANUP}"


def restored(daemonset: Object) -> dict[str, Any]:
    """Return the DaemonSet for creating it again, without the fields that the API server added."""
    metadata = {
        key: value
        for key, value in daemonset["metadata"].items()
        if key in ("name", "namespace", "labels", "annotations")
    }
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": daemonset["spec"]}


def made_here(daemonset: Object) -> bool:
    """Return True if `cleanup_daemonset` made the DaemonSet."""
    metadata = daemonset["metadata"]
    return bool((metadata.get("labels") or {}).get(LABEL) == metadata["name"])


def _daemon(daemonset: Object, pod: Object) -> tuple[Object, _Kind]:
    """Return the container that runs a verb of this plugin: after the program's name or, in the chart, as first argument."""
    labelled = (daemonset["metadata"].get("labels") or {}).get("app.kubernetes.io/component") in _COMPONENTS
    for container in pod.get("containers") or []:
        words = _words(container)
        for kind in _KINDS:
            if labelled and not container.get("command") and words[:1] == [kind.verb]:
                return container, kind
            if any(posixpath.basename(word) in _PROGRAMS and verb == kind.verb for word, verb in pairwise(words)):
                return container, kind
    raise ForeignDaemonSetError(
        "it does not run gpu-plugin: no container has the command gpu-plugin run or gpu-plugin mps, nor, under the chart's label "
        "app.kubernetes.io/component, run or mps as its first argument"
    )


# Values of the label app.kubernetes.io/component in the chart and in deploy/
_COMPONENTS = ("device-plugin", "mps-control-daemon")

_PROGRAMS = ("gpu-plugin", "gpu_plugin")  # the word before a verb: the command, or the module


def _words(container: Object) -> list[str]:
    return [*(container.get("command") or []), *(container.get("args") or [])]


def _directory(container: Object, kind: _Kind) -> str:
    """Return the directory to remove, as arguments, environment or the default name it."""
    words = _words(container)
    for at, word in enumerate(words):
        if word == kind.flag and at + 1 < len(words):
            return str(words[at + 1])
        if word.startswith(f"{kind.flag}="):
            return str(word.partition("=")[2])
    named = [each.get("value") for each in container.get("env") or [] if each.get("name") == kind.env]
    return str(named[-1]) if named and named[-1] else kind.default


def _needed(pod: Object, container: Object, kind: _Kind) -> tuple[list[Object], list[Object]]:
    """Return volumes and mounts for cleaning up, without the directory of the other kind, which the kubelet would create."""
    others = {place for other in _KINDS if other != kind for place in _places(container, other)}
    mounts = [
        each for each in container.get("volumeMounts") or [] if posixpath.normpath(each["mountPath"]) not in others
    ]
    names = {each["name"] for each in mounts}
    return [each for each in pod.get("volumes") or [] if each["name"] in names], mounts


def _places(container: Object, kind: _Kind) -> set[str]:
    """Return the paths at which the directory to remove may be mounted."""
    return {posixpath.normpath(place) for place in (_directory(container, kind), kind.mounted_at) if place}


def _with_parent(
    volumes: list[Object], mounts: list[Object], container: Object, kind: _Kind
) -> tuple[list[Object], list[Object], list[str]]:
    """Return volumes and mounts with the parent of the directory in its place, and an argument with its new path.

    They are unchanged, without that argument, if the directory is not a host path, or if its parent is the node's root, which
    no pod should get.
    """
    places = _places(container, kind)
    mount = next((each for each in mounts if posixpath.normpath(each["mountPath"]) in places), None)
    volume = next((each for each in volumes if mount is not None and each["name"] == mount["name"]), None)
    host = posixpath.normpath(volume["hostPath"]["path"]) if volume is not None and volume.get("hostPath") else "/"
    parent, name = posixpath.split(host)
    if mount is None or volume is None or parent == "/" or "subPath" in mount:
        return volumes, mounts, []
    wider = {"name": volume["name"], "hostPath": {"path": parent, "type": "Directory"}}
    at = {"name": mount["name"], "mountPath": PARENT} | (
        {"mountPropagation": kind.propagation} if kind.propagation else {}
    )
    return (
        [wider if each is volume else each for each in volumes],
        [at if each is mount else each for each in mounts],
        [f"{kind.flag}={PARENT}/{name}"],
    )


def progress(daemonset: Object) -> tuple[int, int] | None:
    """Return the numbers of clean nodes and of all nodes; None until the controller has processed the DaemonSet."""
    status = daemonset.get("status") or {}
    if int(status.get("observedGeneration", 0)) < int(daemonset.get("metadata", {}).get("generation", 1)):
        return None
    return int(status.get("numberReady", 0)), int(status.get("desiredNumberScheduled", 0))
