"""The status of a node, as one typed value. All output for operators is made from it, and it is the content of /status.json.

`NodeView` builds it. `gpu-plugin status --schema` prints its JSON Schema. Times are Unix times in seconds. New fields do not
change `FORMAT`; unknown fields are ignored by readers.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gpu_plugin.health.explain import Explanation
from gpu_plugin.health.notices import Notice

FORMAT = 2  # version of the format. It changes if programs that read the status must be changed.

# critical: pods do not get, or cannot use, some GPUs. warning: something else is not as configured. note: no fault.
Severity = Literal["critical", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")

# unhealthy: a fault of the GPU keeps it from pods. withheld: it is sound, and another fault keeps devices of it from pods.
# degraded: pods get it, and an operator should look at it. held-back: only an operator's order keeps it from pods.
GpuState = Literal["unhealthy", "withheld", "degraded", "held-back", "healthy"]

# The states, the worst first.
STATES: tuple[GpuState, ...] = ("unhealthy", "withheld", "degraded", "held-back", "healthy")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the status."""


class Step(msgspec.Struct, frozen=True):
    """A step of a remedy: a sentence, and the command that does it, empty if no command does."""

    text: str
    command: str = ""


class Problem(Part, frozen=True, kw_only=True):
    """A problem of the node, or something that an operator should know.

    `kind` is a row of `remedies.REMEDIES`, or `gpu-SIGNAL`. `title` has a few words, `cause` a sentence. `object` names what is
    concerned: a GPU, a resource, a file, the node. `gpu` is the uuid of a GPU, and `withholds` are the uuids of the GPUs whose
    devices the problem keeps from pods. `pods` are the pods that use it, as namespace/name, or None if they are not known.
    `recovers` completes the sentence "Recovers when".
    """

    kind: str
    severity: Severity
    title: str
    cause: str
    object: str = ""
    gpu: str = ""
    withholds: tuple[str, ...] = ()
    since: float | None = None
    pods: tuple[str, ...] | None = ()
    steps: tuple[Step, ...] = ()
    recovers: str = ""


class Process(Part, frozen=True, kw_only=True):
    """The daemon's process. `log_lines_dropped` counts log lines that could not be written to standard error."""

    version: str
    python: str = ""
    pid: int = 0
    started: float = 0.0
    log_lines_dropped: int = 0


class State(Part, frozen=True, kw_only=True):
    """The state directory, and why a restart would lose state; empty if it would lose nothing."""

    directory: str = ""
    trouble: str = ""


class Driver(Part, frozen=True, kw_only=True):
    """The NVIDIA driver.

    `trouble` is the reason why no GPU can be reached. `no_gpu` is the reason why the node need not have a GPU. `answered` is
    whether the driver has answered yet. `restart` is the reason why the plugin must be restarted.
    """

    version: str = ""
    trouble: str = ""
    no_gpu: str = ""
    answered: bool = True
    restart: str = ""


class Missing(Part, frozen=True, kw_only=True):
    """A GPU that is on the PCI bus, or was there before, and that the driver does not list. `name` is its name for people."""

    name: str
    why: str
    bus_id: str = ""
    uuid: str = ""
    model: str = ""


class Registration(Part, frozen=True, kw_only=True):
    """The registration of a resource with the kubelet.

    `since` is the time of the registration or of its loss, None if there was no registration. `why` is the reason why the
    resource is not registered. `endpoint` is the path of its socket.
    """

    registered: bool = False
    since: float | None = None
    why: str = ""
    endpoint: str = ""


class Resource(Part, frozen=True, kw_only=True):
    """A resource: its listed, healthy and retired devices.

    Retired devices are gone, and are listed until no pod can hold them. `sharing` has the ways in which devices are shared.
    `held_back` counts unhealthy devices that only an operator's order keeps from pods, and
    `faulty` unhealthy devices with a fault of their hardware. `held` counts devices that pods hold,
    None if that is not known. `reasons` has the first reasons of unhealthy devices.
    """

    devices: int
    healthy: int
    retired: int = 0
    sharing: tuple[str, ...] = ()
    held_back: int = 0
    faulty: int = 0
    held: int | None = None
    reasons: tuple[str, ...] = ()
    registration: Registration = Registration()


class Kubelet(Part, frozen=True, kw_only=True):
    """The kubelet's socket for registrations, empty if nothing is registered, and the directory of the plugin's sockets."""

    socket: str = ""
    directory: str = ""


class Configuration(Part, frozen=True, kw_only=True):
    """The configuration in force.

    `file` is its file, or empty, `since` the time at which it came into force. `wanted` is the last requested file,
    empty if it is in force. `refused` is the reason why it is not in force, `faults` a sentence for each error.
    `unheard` is the reason why a change of the node's label would be missed. `without_effect` has flags and variables that change
    nothing. `reloads` counts the reads by outcome.
    """

    file: str = ""
    since: float | None = None
    wanted: str = ""
    refused: str = ""
    faults: tuple[str, ...] = ()
    unheard: str = ""
    without_effect: tuple[str, ...] = ()
    reloads: Mapping[str, int] = {}


class Strategy(Part, frozen=True, kw_only=True):
    """The device list strategies in use, and the reason of an automatic choice."""

    used: tuple[str, ...] = ()
    reason: str = ""


class Cdi(Part, frozen=True, kw_only=True):
    """The CDI specifications: the number of GPU devices, why no device can be used, and files that were left out."""

    directory: str = ""
    devices: int = 0
    trouble: str = ""
    complaints: tuple[str, ...] = ()


class Cluster(Part, frozen=True, kw_only=True):
    """The reports to the cluster.

    `cordoned` has the uuids of the GPUs that the Node's annotation cordons. `trouble` has a sentence for each report that does
    not work. `requests` and `events` count requests to the API server, and Kubernetes Events.
    """

    node: str = ""
    cordoned: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()
    requests: Mapping[str, int] = {}
    events: Mapping[str, int] = {}


class Labels(Part, frozen=True, kw_only=True):
    """The node's labels: how they are written, and why they are not."""

    way: str = ""
    trouble: str = ""


class HolderCount(Part, frozen=True, kw_only=True):
    """A container, and the number of devices that it holds."""

    namespace: str
    pod: str
    container: str
    devices: int = 1


class Devices(Part, frozen=True, kw_only=True):
    """The devices of one resource that are one GPU or MIG device: several if it is shared.

    `id` is the id that makes it visible to a container. `kind` is gpu or mig. `index` is its index, such as 0 or 0:3. `reason`
    is why its devices may not be allocated. `shared` is the way in which it is shared. `held` counts the devices that containers
    hold, None if that is not known; `holders` has the first of these containers, and `left_out` the number of the others.
    """

    resource: str
    id: str
    kind: str = "gpu"
    index: str = ""
    listed: int = 1
    healthy: int = 1
    retired: int = 0
    reason: str = ""
    shared: str = ""
    held: int | None = None
    holders: tuple[HolderCount, ...] = ()
    left_out: int = 0


class Gpu(Part, frozen=True, kw_only=True):
    """A GPU.

    `healthy` is its state for the kubelet, and `verdict` the worst verdict of its open signals, including its MIG devices.
    `since` is the time at which the oldest signal with this verdict opened. `signals` are the open signals, the worst first.
    `held_back` has the orders of operators, if only orders keep it from pods. `withheld` has the reasons why devices of healthy
    hardware are kept from pods. `holders` are pods as namespace/name, None if they are not known. `readings` are the newest
    values by name (`readings.told`), in the units of the names.
    """

    index: int
    uuid: str
    bus_id: str = ""
    model: str = ""
    state: GpuState = "healthy"
    healthy: bool = True
    verdict: str = "OK"
    since: float | None = None
    signals: tuple[Explanation, ...] = ()
    held_back: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    holders: tuple[str, ...] | None = None
    devices: tuple[Devices, ...] = ()
    readings: Mapping[str, float | int | str | bool | None] = {}


class Pods(Part, frozen=True, kw_only=True):
    """The answers of the kubelet's PodResources service: why the pods are not known, and counts of requests and failures.

    `devices` has each held device with its containers, for the metrics. It is empty in /status.json.
    """

    trouble: str = ""
    requests: int = 0
    failures: int = 0
    devices: tuple[tuple[Mapping[str, str | int], tuple[tuple[str, str, str], ...]], ...] = ()


class Links(Part, frozen=True, kw_only=True):
    """The links between the GPUs.

    `gpus` are the indices of GPUs in the order of `rows`, which have nvidia-smi's word for the link of each pair. `words` are
    sentences about the groups, and `legend` has the meaning of each word. `version` changes with the picture /links.svg.
    """

    gpus: tuple[int, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    words: tuple[str, ...] = ()
    legend: Mapping[str, str] = {}
    version: str = ""


class Event(Part, frozen=True, kw_only=True):
    """An event: its time, kind and text; the verdict of a change of health; who gave an order, and why; the GPU's index."""

    at: float
    kind: str
    text: str
    verdict: str = ""
    by: str = ""
    reason: str = ""
    gpu: int | None = None


class Counters(Part, frozen=True, kw_only=True):
    """Counts since the start, for the metrics.

    `transitions` and `xids` are the lists of `HealthReports`, `xid_classes` has the recovery class of each Xid of the policy, and
    `supported`, by uuid and signal, is whether the GPU reports the values that the signal needs. `kubelet` is `KubeletCounts`,
    `nvml` is `CallTimes`, and `mps` has the counts of gpu-plugin mps by resource.
    """

    snapshot_version: int = 0
    transitions: tuple[Mapping[str, Any], ...] = ()
    xids: tuple[Mapping[str, Any], ...] = ()
    xid_classes: Mapping[str, str] = {}
    supported: Mapping[str, Mapping[str, bool]] = {}
    kubelet: Mapping[str, Any] = {}
    nvml: Mapping[str, Any] = {}
    mps: Mapping[str, Any] = {}


class Status(Part, frozen=True, kw_only=True):
    """The status of a node.

    `headline` is the state of the node in a few words, and `problems` has the worst first. `waiting` is the reason why this
    daemon does not serve the node, such as another daemon; then only the process and the configuration are known. `unoffered`
    has a sentence for each difference between the configuration and the offer. `pods`, `links`, `events`, `counters` and
    `settings` are empty unless they were requested.
    """

    format: int = FORMAT
    at: float = 0.0
    node: str = ""
    headline: str = ""
    problems: tuple[Problem, ...] = ()
    daemon: Process
    waiting: str = ""
    driver: Driver = Driver()
    kubelet: Kubelet = Kubelet()
    resources: Mapping[str, Resource] = {}
    gpus: tuple[Gpu, ...] = ()
    missing: tuple[Missing, ...] = ()
    unoffered: tuple[str, ...] = ()
    configuration: Configuration = Configuration()
    device_list_strategy: Strategy = Strategy()
    cdi: Cdi | None = None
    state: State = State()
    cluster: Cluster | None = None
    labels: Labels = Labels()
    pods: Pods | None = None
    links: Links | None = None
    events: tuple[Event, ...] = ()
    counters: Counters | None = None
    settings: Mapping[str, Any] = {}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the status."""
    return msgspec.json.schema(Status)
