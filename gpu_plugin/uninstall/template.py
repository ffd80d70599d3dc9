"""What becomes of a DaemonSet of `gpu-plugin run` so that its pods clean their nodes up. Pure."""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_plugin.config.settings import STATE_DIR

Object = Mapping[str, Any]
"""A Kubernetes object, or a part of one, as JSON gives it."""

CLEANUP = "cleanup"
"""The verb, and the name of the init container that runs it."""

_KEPT = ("image", "imagePullPolicy", "securityContext", "resources")
"""What the container that only stays has of the daemon's."""

_KEPT_FOR_CLEANUP = (*_KEPT, "command", "env", "envFrom", "volumeMounts")


class ForeignDaemonSetError(ValueError):
    """The DaemonSet does not run gpu-plugin in a way that could be changed; the text says what is missing."""


def cleanup_patch(daemonset: Object) -> dict[str, Any]:
    """A JSON merge patch (RFC 7386) after which the DaemonSet's pods clean up, all nodes at once, and then stay.

    The daemon's container becomes an init container of the same image, environment, rights and volumes that runs `gpu-plugin
    cleanup` with the daemon's own arguments. A pod is Ready once that has succeeded. Where the state directory is a host path
    mounted under its own name, the directory that holds it is mounted in its place: only so can it be removed itself.

    Raises:
        ForeignDaemonSetError: there is no container whose command or arguments have the word run.
    """
    pod = daemonset.get("spec", {}).get("template", {}).get("spec", {})
    container = _daemon(pod)
    command, arguments = _with_verb(container)
    cleaning = {key: container[key] for key in _KEPT_FOR_CLEANUP if key in container} | {"name": CLEANUP}
    cleaning |= {"args": arguments} | ({"command": command} if command else {})
    volumes, mounts = _with_parent(pod.get("volumes") or [], container.get("volumeMounts") or [], _state_dir(container))
    cleaning["volumeMounts"] = mounts
    staying = {key: container[key] for key in _KEPT if key in container} | {"name": container["name"]}
    if CLEANUP in command:
        staying["command"] = _only_staying(command)
    else:
        staying |= {"args": _only_staying(arguments)} | ({"command": command} if command else {})
    template = {"spec": {"initContainers": [cleaning], "containers": [staying], "volumes": volumes}}
    at_once = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%", "maxSurge": 0}}
    return {"spec": {"updateStrategy": at_once, "template": template}}


def _daemon(pod: Object) -> Object:
    for container in pod.get("containers") or []:
        if "run" in [*(container.get("command") or []), *(container.get("args") or [])]:
            found: Object = container
            return found
    raise ForeignDaemonSetError("none of its containers has the argument run: it does not run gpu-plugin")


def _with_verb(container: Object) -> tuple[list[str], list[str]]:
    """Command and arguments with the verb cleanup in place of run."""
    command, arguments = list(container.get("command") or []), list(container.get("args") or [])
    words = command if "run" in command else arguments
    words[words.index("run")] = CLEANUP
    return command, arguments


def _only_staying(words: Sequence[str]) -> list[str]:
    return [*words[: words.index(CLEANUP) + 1], "--stay"]


def _state_dir(container: Object) -> str:
    """The daemon's state directory, as its arguments, its environment or the default say."""
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    for at, word in enumerate(words):
        if word == "--state-dir" and at + 1 < len(words):
            return str(words[at + 1])
        if word.startswith("--state-dir="):
            return str(word.partition("=")[2])
    named = [each.get("value") for each in container.get("env") or [] if each.get("name") == "STATE_DIR"]
    return str(named[-1]) if named and named[-1] else STATE_DIR


def _with_parent(
    volumes: Sequence[Object], mounts: Sequence[Object], directory: str
) -> tuple[list[Object], list[Object]]:
    """Volumes and mounts with the parent of the state directory in its place, where both have the same last name."""
    mount = next((each for each in mounts if posixpath.normpath(each["mountPath"]) == directory.rstrip("/")), None)
    volume = next((each for each in volumes if mount is not None and each["name"] == mount["name"]), None)
    host = posixpath.normpath(volume["hostPath"]["path"]) if volume is not None and volume.get("hostPath") else ""
    parent, name = posixpath.split(host)
    here, own = posixpath.split(directory.rstrip("/"))
    if mount is None or volume is None or name != own or "/" in (parent, here) or "subPath" in mount:
        return list(volumes), list(mounts)
    wider = {"name": volume["name"], "hostPath": {"path": parent, "type": "Directory"}}
    return (
        [wider if each is volume else each for each in volumes],
        [{"name": mount["name"], "mountPath": here} if each is mount else each for each in mounts],
    )


def progress(daemonset: Object) -> tuple[int, int] | None:
    """How many nodes are clean and how many there are; None while the DaemonSet's controller has not taken the patch in."""
    status = daemonset.get("status") or {}
    if int(status.get("observedGeneration", 0)) < int(daemonset.get("metadata", {}).get("generation", 0)):
        return None
    wanted, updated = int(status.get("desiredNumberScheduled", 0)), int(status.get("updatedNumberScheduled", 0))
    # Pods of the former template count as ready, too, until they are gone.
    ready = min(int(status.get("numberReady", 0)), updated)
    return ready, wanted
