"""The problems of a node, worst first, and its headline. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gpu_plugin.config.words import are
from gpu_plugin.health.explain import Explanation
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.signals.orders import MAINTENANCE
from gpu_plugin.status.model import SEVERITIES, Gpu, Problem, Severity, Status, Step
from gpu_plugin.status.remedies import TO_DO, Shell, of, of_notice, of_signal

NODE = "node"


def problems(status: Status, shell: Shell) -> tuple[Problem, ...]:
    """Return the problems of a status, which needs no `problems` itself.

    Problems of the same cause are one problem. The order is: severity, then driver, registration, GPUs, state and CDI, the
    configuration, and the cluster.
    """
    if status.waiting:
        found = [_waiting(status, shell), *_configuration(status, shell)]
    else:
        parts = (_driver, _registrations, _missing, _gpus, _resources, _state, _cdi, _configuration, _cluster)
        found = [problem for part in parts for problem in part(status, shell)]
    return tuple(sorted(found, key=lambda problem: SEVERITIES.index(problem.severity)))


def headline(status: Status, found: Sequence[Problem]) -> str:
    """Return the state of the node in a few words: the worst problems by their titles, and the number of the others."""
    if status.waiting:
        return found[0].title
    serious = [problem.title for problem in found if problem.severity != "note"]
    if serious:
        more = len(serious) - 2
        return ". ".join(serious[:2]) + (f". {more} more" if more > 0 else "")
    if not status.gpus:
        return "No GPU on this node" if status.driver.no_gpu else "No GPU is known yet"
    aside = Counter(gpu.state for gpu in status.gpus if gpu.state != "healthy")
    healthy = sum(gpu.healthy for gpu in status.gpus)
    whole = "The GPU is" if len(status.gpus) == 1 else f"All {len(status.gpus)} GPUs are"
    words = f"{whole} Healthy" if healthy == len(status.gpus) else f"{healthy} of {len(status.gpus)} GPUs are Healthy"
    return ", ".join([words, *(f"{count} {state}" for state, count in aside.items())])


class _Kind(NamedTuple):
    """A kind of problem of the node. `recovers` completes the sentence "Recovers when"."""

    severity: Severity
    title: str  # empty if the title names an object
    recovers: str


_KINDS: Mapping[str, _Kind] = {
    "waiting": _Kind("critical", "Another daemon has this node", "the other daemon has ended"),
    "no-configuration": _Kind("critical", "Nothing is served yet", "there is a valid configuration"),
    "driver": _Kind("critical", "The driver cannot be used", "the driver answers again"),
    "driver-silent": _Kind("critical", "The driver does not answer", "the driver answers"),
    "no-gpu": _Kind("note", "No GPU on this node", ""),
    "restart": _Kind("critical", "The plugin needs a restart", "the plugin was restarted"),
    "not-registered": _Kind("critical", "", "the kubelet accepts the registration"),
    "missing-gpu": _Kind("critical", "A GPU is missing", "the driver lists it again"),
    "withheld": _Kind("warning", "", "the cause is removed"),
    "resource": _Kind("critical", "", "a device is Healthy"),
    "state": _Kind("critical", "State is not written", "the state is written"),
    "cdi": _Kind("critical", "CDI devices cannot be used", "the specifications are written"),
    "cdi-file": _Kind("note", "CDI leaves a file out", "the file is safe"),
    "configuration": _Kind("warning", "", "the configuration is valid"),
    "label": _Kind("warning", "The Node's label is not watched", "the Node's label is read again"),
    "without-effect": _Kind("note", "A setting has no effect", "the setting is removed, or has all that it needs"),
    "unoffered": _Kind("warning", "Not served as configured", "hardware and configuration fit"),
    "cluster": _Kind("warning", "Reports to the cluster fail", "the API server accepts them"),
    "labels": _Kind("warning", "Node labels are not written", "the labels are written"),
}


def _node(kind: str, cause: str, shell: Shell, thing: str = NODE, title: str = "") -> Problem:
    """Return a problem of the node. A remedy within the cause (`TO_DO`) replaces the table's steps."""
    severity, usual, recovers = _KINDS[kind]
    about, _, remedy = cause.partition(TO_DO)
    steps = (Step(remedy[:1].upper() + remedy[1:]),) if remedy else of(kind, shell)
    named = title or usual
    return Problem(kind=kind, severity=severity, title=named, cause=about, object=thing, steps=steps, recovers=recovers)


def _waiting(status: Status, shell: Shell) -> Problem:
    return _node("no-configuration" if status.configuration.since is None else "waiting", status.waiting, shell)


def _driver(status: Status, shell: Shell) -> Iterator[Problem]:
    driver = status.driver
    if driver.trouble:
        yield _node("driver", driver.trouble, shell, "driver")
    elif not driver.answered:
        cause = "The driver has not answered yet, so no GPU is known to be usable"
        yield _node("driver-silent", cause, shell, "driver")
    if driver.no_gpu:
        yield _node("no-gpu", driver.no_gpu, shell, "driver")
    if driver.restart:
        yield _node("restart", driver.restart, shell, "driver")


def _registrations(status: Status, shell: Shell) -> Iterator[Problem]:
    """Yield a problem for each reason why resources are not registered: an outage of the kubelet is one problem."""
    if not status.kubelet.socket:
        return
    by_reason: dict[str, list[str]] = {}
    for name, resource in status.resources.items():
        if not resource.registration.registered:
            by_reason.setdefault(resource.registration.why, []).append(name)
    for why, names in by_reason.items():
        title = f"{names[0]} is not registered" if len(names) == 1 else f"{len(names)} resources are not registered"
        yield _node("not-registered", why, shell, ", ".join(names), title)


def _missing(status: Status, shell: Shell) -> Iterator[Problem]:
    for gpu in status.missing:
        problem = _node("missing-gpu", f"{gpu.name}: {gpu.why}", shell, gpu.name)
        forget = shell.command(f"gpu-plugin uncordon {gpu.uuid} --override")
        more = (Step("If it was removed for good, delete its record", forget),) if gpu.uuid else ()
        yield replace(problem, gpu=gpu.uuid, steps=(*problem.steps, *more))


def _gpus(status: Status, shell: Shell) -> Iterator[Problem]:
    """Yield the problems of GPUs: its signals of the same remedy in one problem, and the reasons why GPUs are withheld."""
    for gpu in status.gpus:
        yield from _signals(gpu, shell)
        for notice in gpu.notices:
            yield Problem(
                kind="notice",
                severity="note",
                title=f"GPU {gpu.index}: {notice.title}",
                cause=notice.found,
                object=f"GPU {gpu.index}",
                gpu=gpu.uuid,
                pods=gpu.holders,
                steps=of_notice(notice, gpu.uuid, shell, released=_released(gpu)),
            )
    withheld: dict[str, list[Gpu]] = {}
    for gpu in status.gpus:
        for why in gpu.withheld:
            withheld.setdefault(why, []).append(gpu)
    for why, gpus in withheld.items():
        title = f"{_named(gpus)} {are(len(gpus))} withheld"
        problem = _node("withheld", why, shell, _named(gpus), title)
        yield replace(problem, withholds=tuple(gpu.uuid for gpu in gpus))


def _named(gpus: Sequence[Gpu]) -> str:
    return f"GPU {gpus[0].index}" if len(gpus) == 1 else f"{len(gpus)} GPUs"


def _released(gpu: Gpu) -> bool:
    return MAINTENANCE in {signal.name for signal in gpu.signals}


def _signals(gpu: Gpu, shell: Shell) -> Iterator[Problem]:
    """Yield a problem for each remedy that a GPU needs: signals of the same remedy have one cause."""
    by_remedy: dict[tuple[str, str], list[Explanation]] = {}
    for signal in gpu.signals:
        if Verdict[signal.verdict] >= Verdict.DEGRADED:
            by_remedy.setdefault((signal.remedy, signal.device), []).append(signal)
    for (_, device), signals in by_remedy.items():
        first = signals[0]
        order = gpu.state == "held-back"
        fatal = first.verdict == Verdict.FATAL.name
        name = f"GPU {gpu.index}" if not device else f"MIG device {device} of GPU {gpu.index}"
        state = "is held back by an operator" if order else "is Unhealthy" if fatal else "is degraded"
        xid = next((f" (Xid {signal.xid})" for signal in signals if signal.xid is not None), "")
        yield Problem(
            kind=f"gpu-{first.name}",
            severity="note" if order or not fatal else "critical",
            title=f"{name} {state}{xid}",
            cause="; ".join(dict.fromkeys(signal.detail for signal in signals)),
            object=name,
            gpu=gpu.uuid,
            since=min((signal.since for signal in signals if signal.since is not None), default=None),
            pods=gpu.holders,
            steps=of_signal(first, gpu.uuid, shell, released=_released(gpu)),
            recovers=first.recovers,
        )


def _resources(status: Status, shell: Shell) -> Iterator[Problem]:
    """Yield a problem for each resource without a Healthy device, unless another problem explains it."""
    unfit = {gpu.uuid for gpu in status.gpus if not gpu.healthy or gpu.withheld}
    if status.driver.trouble or not status.driver.answered:
        return
    for name, resource in status.resources.items():
        gpus = {gpu.uuid for gpu in status.gpus for each in gpu.devices if each.resource == name}
        if resource.devices > resource.retired and not resource.healthy and not (gpus and gpus <= unfit):
            cause = "; ".join(resource.reasons) or "none of its devices is Healthy"
            yield _node("resource", cause, shell, name, f"{name} has no Healthy device")


def _state(status: Status, shell: Shell) -> Iterator[Problem]:
    state = status.state
    if state.trouble:
        cause = state.trouble if state.directory in state.trouble else f"{state.directory}: {state.trouble}"
        yield _node("state", cause, shell, state.directory)


def _cdi(status: Status, shell: Shell) -> Iterator[Problem]:
    cdi = status.cdi
    if cdi is None:
        return
    if cdi.trouble:
        yield _node("cdi", cdi.trouble, shell, cdi.directory)
    for complaint in cdi.complaints:
        yield _node("cdi-file", complaint, shell, cdi.directory)


def _configuration(status: Status, shell: Shell) -> Iterator[Problem]:
    configuration = status.configuration
    if refused := "; ".join(configuration.faults) or configuration.refused:
        where = configuration.wanted or configuration.file or "configuration"
        former = configuration.since is not None
        title = "The new configuration is refused" if former else "The configuration is refused"
        yield _node("configuration", refused, shell, where, title)
    if configuration.unheard:
        yield _node("label", configuration.unheard, shell)
    for why in configuration.without_effect:
        yield _node("without-effect", why, shell, "configuration")
    for why in status.unoffered:
        yield _node("unoffered", why, shell, "configuration")


def _cluster(status: Status, shell: Shell) -> Iterator[Problem]:
    for why in status.cluster.trouble if status.cluster is not None else ():
        yield _node("cluster", why, shell, "cluster")
    if status.labels.trouble:
        yield _node("labels", status.labels.trouble, shell, "labels")
