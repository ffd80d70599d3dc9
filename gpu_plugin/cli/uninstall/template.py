"""The DaemonSet whose pods clean nodes up after those of another one. Pure."""

import posixpath
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from gpu_plugin.config.places import STATE_DIR

Object = Mapping[str, Any]
"""A Kubernetes object, or a part of one, as JSON gives it."""

CLEANUP = "cleanup"
"""The verb, and the name of the init container that runs it."""

PARENT = "/gpu-plugin-parent"
"""Where the directory is mounted that holds the one to be removed."""

_KEPT = ("image", "imagePullPolicy", "resources")
"""What the container that only stays has of the daemon's."""

_KEPT_FOR_CLEANUP = (*_KEPT, "securityContext", "env", "envFrom")

_NOT_KEPT_OF_A_POD = ("hostNetwork", "hostPID")
"""What the pods that clean up do without."""

LABEL = "gpu-plugin/cleanup"
"""The label that selects them."""

_RELEASE_NAME, _RELEASE_NAMESPACE = "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"
"""Annotations of every object that Helm installs, hooks aside (helm.sh/helm, pkg/action/validate.go)."""

_NO_RIGHTS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
"""The security context of the container that only stays."""


class ForeignDaemonSetError(ValueError):
    """The DaemonSet does not run gpu-plugin in a way that could be changed; the text says what is missing."""


class HelmRelease(msgspec.Struct, frozen=True):
    """A release of the chart, by its namespace and name."""

    namespace: str
    name: str

    def installed(self, daemonset: Object) -> bool:
        """Whether Helm installed the DaemonSet as this release, or it cleans up after such a DaemonSet."""
        return _helms(daemonset) == {_RELEASE_NAME: self.name, _RELEASE_NAMESPACE: self.namespace}


def _helms(daemonset: Object) -> dict[str, str]:
    """Helm's own annotations of a DaemonSet."""
    annotations = daemonset["metadata"].get("annotations") or {}
    return {key: annotations[key] for key in (_RELEASE_NAME, _RELEASE_NAMESPACE) if key in annotations}


class _Kind(msgspec.Struct, frozen=True):
    """A verb whose pods leave something in one directory of the node: how that is named, and how it is cleaned up."""

    verb: str
    flag: str
    env: str
    default: str
    mounted_at: str = ""
    cleaning: tuple[str, ...] = ()
    propagation: str = ""
    reports: bool = False
    """Whether it writes to the Kubernetes API what is to be taken back, where the pod has a token for that."""


_KINDS = (
    _Kind("run", "--state-dir", "STATE_DIR", STATE_DIR, reports=True),
    # The shared memory is unmounted on the node, too.
    _Kind("mps", "--mps-root", "MPS_ROOT", "", "/mps", ("--mps",), "Bidirectional"),
)


def cleanup_daemonset(daemonset: Object, owner: Object | None = None) -> dict[str, Any]:
    """A DaemonSet for the same nodes whose pods clean up after those of the given one, and then stay.

    The container of `gpu-plugin run` or `gpu-plugin mps` becomes an init container of the same image, environment, rights and
    volumes that runs `gpu-plugin cleanup` with the same arguments. A pod is Ready once that has succeeded. Where the directory
    that is to go is a host path, the one that holds it is mounted in its place: only so can it be removed itself.

    Args:
        daemonset: the one that is to be uninstalled; it is not changed, so that whoever keeps it need not mend it.
        owner: a reference to the object with which the new one goes, or None.

    Raises:
        ForeignDaemonSetError: none of its containers runs `gpu-plugin run` or `gpu-plugin mps`.
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
        made["annotations"] = helms  # by which the next attempt of a Helm release knows that this is of its own
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
    """What the DaemonSet is called that cleans up after the one of this name; short enough for a label."""
    return f"{name[: 63 - len(CLEANUP) - 1].rstrip('-._')}-{CLEANUP}"


def restored(daemonset: Object) -> dict[str, Any]:
    """The DaemonSet as it can be made again: without what the API server added to it."""
    metadata = {
        key: value
        for key, value in daemonset["metadata"].items()
        if key in ("name", "namespace", "labels", "annotations")
    }
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": daemonset["spec"]}


def made_here(daemonset: Object) -> bool:
    """Whether a DaemonSet is one of `cleanup_daemonset`."""
    metadata = daemonset["metadata"]
    return bool((metadata.get("labels") or {}).get(LABEL) == metadata["name"])


def _daemon(daemonset: Object, pod: Object) -> tuple[Object, _Kind]:
    """The container that runs one of our verbs: by a command that names us, or, in our image, as first argument."""
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


_COMPONENTS = ("device-plugin", "mps-control-daemon")
"""Values of that label in the chart and in deploy/."""

_PROGRAMS = ("gpu-plugin", "gpu_plugin")
"""What comes before a verb: the command, and the module."""


def _words(container: Object) -> list[str]:
    return [*(container.get("command") or []), *(container.get("args") or [])]


def _directory(container: Object, kind: _Kind) -> str:
    """The directory that is to go, as arguments, environment or the default name it."""
    words = _words(container)
    for at, word in enumerate(words):
        if word == kind.flag and at + 1 < len(words):
            return str(words[at + 1])
        if word.startswith(f"{kind.flag}="):
            return str(word.partition("=")[2])
    named = [each.get("value") for each in container.get("env") or [] if each.get("name") == kind.env]
    return str(named[-1]) if named and named[-1] else kind.default


def _needed(pod: Object, container: Object, kind: _Kind) -> tuple[list[Object], list[Object]]:
    """Volumes and mounts for cleaning up: none through which the kubelet makes the directory of the other kind again."""
    others = {place for other in _KINDS if other != kind for place in _places(container, other)}
    mounts = [
        each for each in container.get("volumeMounts") or [] if posixpath.normpath(each["mountPath"]) not in others
    ]
    names = {each["name"] for each in mounts}
    return [each for each in pod.get("volumes") or [] if each["name"] in names], mounts


def _places(container: Object, kind: _Kind) -> set[str]:
    """Where the directory that is to go may be mounted."""
    return {posixpath.normpath(place) for place in (_directory(container, kind), kind.mounted_at) if place}


def _with_parent(
    volumes: list[Object], mounts: list[Object], container: Object, kind: _Kind
) -> tuple[list[Object], list[Object], list[str]]:
    """Volumes and mounts with the parent of the directory in its place, and the argument that says where it is then.

    Without that argument and as they were where it is no host path or lies in the node's root, which nobody should be given.
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
    """How many nodes are clean and how many there are; None while its controller has not seen the DaemonSet."""
    status = daemonset.get("status") or {}
    if int(status.get("observedGeneration", 0)) < int(daemonset.get("metadata", {}).get("generation", 1)):
        return None
    return int(status.get("numberReady", 0)), int(status.get("desiredNumberScheduled", 0))
