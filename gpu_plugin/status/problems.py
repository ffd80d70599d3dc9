"""The problems of a node, worst first, and its headline. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

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
    found = [*_waiting(status, shell)] if status.waiting else [*_driver(status, shell), *_registrations(status, shell)]
    if not status.waiting:
        found += [*_missing(status, shell), *_gpus(status, shell), *_resources(status, shell)]
        found += [*_state(status, shell), *_cdi(status, shell)]
    found += _configuration(status, shell)
    if not status.waiting:
        found += _cluster(status, shell)
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


def _node(
    kind: str, severity: Severity, title: str, cause: str, shell: Shell, recovers: str, thing: str = NODE
) -> Problem:
    """Return a problem of the node. A remedy within the cause (`TO_DO`) replaces the table's steps."""
    about, _, remedy = cause.partition(TO_DO)
    steps = (Step(remedy[:1].upper() + remedy[1:]),) if remedy else of(kind, shell)
    return Problem(kind=kind, severity=severity, title=title, cause=about, object=thing, steps=steps, recovers=recovers)


def _waiting(status: Status, shell: Shell) -> Iterator[Problem]:
    if status.configuration.since is None:
        recovers = "there is a valid configuration"
        yield _node("no-configuration", "critical", "Nothing is served yet", status.waiting, shell, recovers)
    else:
        yield _node(
            "waiting", "critical", "Another daemon has this node", status.waiting, shell, "the other daemon has ended"
        )


def _driver(status: Status, shell: Shell) -> Iterator[Problem]:
    driver = status.driver
    if driver.trouble:
        recovers = "the driver answers again"
        yield _node("driver", "critical", "The driver cannot be used", driver.trouble, shell, recovers, "driver")
    elif not driver.answered:
        cause = "The driver has not answered yet, so no GPU is known to be usable"
        yield _node(
            "driver-silent", "critical", "The driver does not answer", cause, shell, "the driver answers", "driver"
        )
    if driver.no_gpu:
        yield _node("no-gpu", "note", "No GPU on this node", driver.no_gpu, shell, "", "driver")
    if driver.restart:
        recovers = "the plugin was restarted"
        yield _node("restart", "critical", "The plugin needs a restart", driver.restart, shell, recovers, "driver")


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
        recovers = "the kubelet accepts the registration"
        yield _node("not-registered", "critical", title, why, shell, recovers, ", ".join(names))


def _missing(status: Status, shell: Shell) -> Iterator[Problem]:
    for gpu in status.missing:
        problem = _node(
            "missing-gpu",
            "critical",
            "A GPU is missing",
            f"{gpu.name}: {gpu.why}",
            shell,
            "the driver lists it again",
            gpu.name,
        )
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
        problem = _node("withheld", "warning", title, why, shell, "the cause is removed", _named(gpus))
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
            yield _node(
                "resource", "critical", f"{name} has no Healthy device", cause, shell, "a device is Healthy", name
            )


def _state(status: Status, shell: Shell) -> Iterator[Problem]:
    state = status.state
    if state.trouble:
        cause = state.trouble if state.directory in state.trouble else f"{state.directory}: {state.trouble}"
        recovers = "the state is written"
        yield _node("state", "critical", "State is not written", cause, shell, recovers, state.directory)


def _cdi(status: Status, shell: Shell) -> Iterator[Problem]:
    cdi = status.cdi
    if cdi is None:
        return
    if cdi.trouble:
        recovers = "the specifications are written"
        yield _node("cdi", "critical", "CDI devices cannot be used", cdi.trouble, shell, recovers, cdi.directory)
    for complaint in cdi.complaints:
        yield _node("cdi-file", "note", "CDI leaves a file out", complaint, shell, "the file is safe", cdi.directory)


def _configuration(status: Status, shell: Shell) -> Iterator[Problem]:
    configuration = status.configuration
    if refused := "; ".join(configuration.faults) or configuration.refused:
        where = configuration.wanted or configuration.file or "configuration"
        former = configuration.since is not None
        title = "The new configuration is refused" if former else "The configuration is refused"
        yield _node("configuration", "warning", title, refused, shell, "the configuration is valid", where)
    if configuration.unheard:
        recovers = "the Node's label is read again"
        yield _node("label", "warning", "The Node's label is not watched", configuration.unheard, shell, recovers)
    for why in configuration.without_effect:
        recovers = "the setting is removed, or has all that it needs"
        yield _node("without-effect", "note", "A setting has no effect", why, shell, recovers, "configuration")
    for why in status.unoffered:
        recovers = "hardware and configuration fit"
        yield _node("unoffered", "warning", "Not served as configured", why, shell, recovers, "configuration")


def _cluster(status: Status, shell: Shell) -> Iterator[Problem]:
    for why in status.cluster.trouble if status.cluster is not None else ():
        yield _node(
            "cluster", "warning", "Reports to the cluster fail", why, shell, "the API server accepts them", "cluster"
        )
    if status.labels.trouble:
        recovers = "the labels are written"
        yield _node(
            "labels", "warning", "Node labels are not written", status.labels.trouble, shell, recovers, "labels"
        )
