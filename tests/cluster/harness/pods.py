"""Pods of the default namespace: create them, wait for them, and inspect their containers."""

import os
import re
import signal
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .api import Api, ApiError, Object
from .image import IMAGE
from .layout import Layout
from .node import Containerd
from .plugin import RESOURCE
from .wait import NotYet, expect, wait_until

NAMESPACE = "default"
CONTAINER = "main"
PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"

FOREVER = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"
"""A shell command that sleeps, and ends at once on SIGTERM."""

GPU_DEVICE = re.compile(r"nvidia\d+")
"""The name of a GPU's device node in /dev, which does not match the device nodes that all GPUs share."""

GRACE = 2
"""Seconds between SIGTERM and SIGKILL for a container."""


@dataclass(frozen=True)
class LogLine:
    """A line that a container wrote, with the time at which the runtime read it."""

    when: datetime
    text: str


class Pod:
    """A pod as the API server returned it at one moment."""

    def __init__(self, content: Object) -> None:
        self.content = content

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.content["metadata"]["uid"])

    @property
    def phase(self) -> str:
        """Pending, Running, Succeeded or Failed."""
        return str(self.content["status"].get("phase", "Pending"))

    @property
    def reason(self) -> str:
        """The kubelet's reason for the pod's phase; often empty."""
        status = self.content["status"]
        return f"{status.get('reason', '')} {status.get('message', '')}".strip()

    @property
    def status(self) -> dict[str, Any]:
        """The container's status; empty before the kubelet has received the pod."""
        statuses: list[dict[str, Any]] = self.content["status"].get("containerStatuses", [])
        return statuses[0] if statuses else {}

    @property
    def container_id(self) -> str:
        """The runtime's id of the container; empty before the container is created."""
        return str(self.status.get("containerID", "")).removeprefix("containerd://")

    @property
    def restarts(self) -> int:
        return int(self.status.get("restartCount", 0))

    @property
    def running(self) -> bool:
        return "running" in self.status.get("state", {})

    @property
    def device_health(self) -> dict[str, str]:
        """Health by device id of the devices that the kubelet gave to the container."""
        resources: list[dict[str, Any]] = self.status.get("allocatedResourcesStatus", [])
        entries = [entry for each in resources for entry in each.get("resources", [])]
        return {entry["resourceID"]: entry["health"] for entry in entries}

    def __str__(self) -> str:
        waiting = self.status.get("state", {}).get("waiting", {})
        conditions: list[dict[str, str]] = self.content["status"].get("conditions", [])
        unmet = [f"{each['type']}: {each['message']}" for each in conditions if each.get("message")]
        node = self.content["spec"].get("nodeName", "no node yet")
        return f"{self.name}: {self.phase} on {node} {self.reason} {waiting or ''} {'; '.join(unmet)}".strip()


class Pods:
    """The pods of one cluster."""

    def __init__(self, api: Api, layout: Layout, containerd: Containerd) -> None:
        self._api = api
        self._layout = layout
        self._containerd = containerd

    def create(
        self,
        name: str,
        *,
        gpus: int,
        resource: str = RESOURCE,
        shell: str = FOREVER,
        restart: str = "Never",
        image: str = IMAGE,
    ) -> Pod:
        """Create a pod with one container.

        Args:
            name: the pod's name.
            gpus: number of devices that it requests; may be 0.
            resource: the resource of the devices.
            shell: the command of its container.
            restart: the pod's restartPolicy: Never, OnFailure or Always.
            image: an image that containerd has.
        """
        limits = {"limits": {resource: str(gpus)}} if gpus else {}
        container = {
            "name": CONTAINER,
            "image": image,
            "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", shell],
            "resources": limits,
        }
        spec = {
            "containers": [container],
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": GRACE,
            "automountServiceAccountToken": False,
            "dnsPolicy": "Default",
            "enableServiceLinks": False,
        }
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        return Pod(self._api.create(PATH, body))

    def get(self, name: str) -> Pod:
        return Pod(self._api.get(f"{PATH}/{name}"))

    def all(self) -> list[Pod]:
        return [Pod(content) for content in self._api.get(PATH)["items"]]

    def run(
        self,
        name: str,
        *,
        gpus: int,
        resource: str = RESOURCE,
        shell: str = FOREVER,
        restart: str = "Never",
        image: str = IMAGE,
    ) -> Pod:
        """Create a pod and wait until its container runs."""
        self.create(name, gpus=gpus, resource=resource, shell=shell, restart=restart, image=image)
        return self.wait_running(name)

    def wait_running(self, name: str, *, within: float = 30.0) -> Pod:
        """Wait until the pod's container runs, and return the pod.

        Raises:
            DeadlineError: the container did not run within `within` seconds.
            AssertionError: the pod has failed.
        """

        def running() -> Pod:
            pod = self.get(name)
            assert pod.phase != "Failed", f"pod {pod}"
            expect(holds=pod.running, seen=pod)
            return pod

        return wait_until(running, f"pod {name} runs", within=within)

    def delete(self, *names: str, within: float = 60.0) -> None:
        """Delete pods and wait until the kubelet has removed them and freed their devices.

        Raises:
            DeadlineError: a pod still exists after `within` seconds.
        """
        for name in names:
            try:
                self._api.delete(f"{PATH}/{name}", grace=GRACE)
            except ApiError as error:
                if error.status != 404:
                    raise

        def gone() -> None:
            left = [pod for pod in self.all() if pod.name in names]
            expect(holds=not left, seen="; ".join(map(str, left)))

        wait_until(gone, f"pods {', '.join(names)} are gone", within=within)

    def delete_all(self) -> None:
        """Delete all pods."""
        self.delete(*(pod.name for pod in self.all()))

    def events(self, name: str) -> list[str]:
        """Return the Events of a pod as `Reason: message`."""
        selector = f"fieldSelector=involvedObject.name={name}"
        events = self._api.get(f"/api/v1/namespaces/{NAMESPACE}/events?{selector}")["items"]
        return [f"{event['reason']}: {event['message']}" for event in events]

    def log(self, pod: Pod) -> list[LogLine]:
        """Return the container's output, over all its restarts."""
        directory = self._layout.pod_logs / f"{NAMESPACE}_{pod.name}_{pod.uid}" / CONTAINER
        lines = [line for file in sorted(directory.glob("*.log")) for line in file.read_text().splitlines()]
        return [_log_line(line) for line in lines]

    def execute(self, pod: Pod, *command: str) -> str:
        """Run a program inside the pod's container and return its standard output."""
        return self._containerd.execute(pod.container_id, list(command))

    def signal(self, pod: Pod, number: signal.Signals) -> None:
        """Send a signal to the pod's first process."""
        os.kill(int(self._process(pod).name), number)

    def environment(self, pod: Pod) -> dict[str, str]:
        """Return the initial environment of the pod's first process, read from outside the container."""
        entries = (self._process(pod) / "environ").read_text().split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)

    def devices(self, pod: Pod) -> dict[str, int]:
        """Return the device numbers of the character devices /dev/nvidia* of the container by name, read from outside."""
        found = {}
        for path in (self._process(pod) / "root" / "dev").glob("nvidia*"):
            status = path.lstat()
            if stat.S_ISCHR(status.st_mode):
                found[path.name] = status.st_rdev
        return found

    def gpu_numbers(self, pod: Pod) -> set[int]:
        """Return N of each /dev/nvidiaN in the container."""
        return {int(name.removeprefix("nvidia")) for name in self.devices(pod) if GPU_DEVICE.fullmatch(name)}

    def _process(self, pod: Pod) -> Path:
        """Wait until the container's first process runs the container's program, and return its directory in /proc.

        A container counts as running when runc gets the command to start it. The process runs the program a little later, and
        has runc's environment until then.
        """
        try:
            process = Path("/proc") / (self._layout.tasks / pod.container_id / "init.pid").read_text()
        except FileNotFoundError:
            raise NotYet(f"container {pod.container_id} of pod {pod} does not run") from None

        def started() -> Path:
            name = (process / "comm").read_text()
            expect(holds=not name.startswith("runc"), seen=f"it is still {name.strip()}")
            return process

        return wait_until(started, f"the program of pod {pod} runs", within=10)


def _log_line(line: str) -> LogLine:
    # Fields of the CRI's log format: time, stream, F for a whole line or P for a part, text.
    when, _, _, text = line.split(" ", 3)
    seconds, _, fraction = when.removesuffix("Z").partition(".")
    return LogLine(datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}").replace(tzinfo=UTC), text)
