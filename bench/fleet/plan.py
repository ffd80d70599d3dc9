"""The events of a node, drawn before the simulation, so that they are the same under every policy."""

import random
from bisect import insort
from dataclasses import dataclass, field
from enum import StrEnum

from bench.fleet import rates
from bench.fleet.faults import APPLICATION_XIDS, OTHER_XIDS
from bench.fleet.rates import APPLICATIONS, ASSUMED, NODE_RATES, Assumed, Part, Rate, incidents

GPUS = 8
"""GPUs of a node."""

_MOST = 100_000  # more than the number of incidents of a kind on one GPU

DAY, HOUR = 86400.0, 3600.0
"""Seconds."""


class What(StrEnum):
    """The kind of an event."""

    INCIDENT = "incident"
    """An incident of `faults.KINDS` on a GPU."""
    APPLICATION = "application"
    """A pod fails by its own fault, independent of the GPU's state."""
    RESTART = "restart"
    """The plugin's process is restarted."""
    REBOOT = "reboot"
    """The node is rebooted for a reason other than its GPUs."""
    RESET = "reset"
    """An operator resets a GPU without a fault."""


@dataclass(frozen=True, slots=True, order=True)
class Happening:
    """An event at the time `at`, in seconds, of a GPU by its position, or of the whole node.

    `name` is the kind of an incident, or the owner of an application's pod. `xids` are the Xids that it raises. `number`
    identifies the incident in the node. `down` is the number of seconds for which the plugin does not run.
    """

    at: float
    number: int
    what: What = field(compare=False)
    gpu: int = field(default=0, compare=False)
    name: str = field(default="", compare=False)
    xids: tuple[int, ...] = field(default=(), compare=False)
    down: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node for `days`, its events in order, and the assumptions. `seed` is for further random values."""

    seed: str
    part: Part
    days: float
    persistence: bool = True
    energy_stays: bool = False
    happenings: tuple[Happening, ...] = ()
    assumed: Assumed = ASSUMED


def drawn(seed: str, part: Part, days: float, rollout: float = 0.0, assumed: Assumed = ASSUMED) -> NodePlan:
    """Draw the plan of a node by published rates. `rollout` is the day of the first rollout to all nodes, from 0.

    Each kind of incident has its own random numbers, so that a changed assumption about one kind does not change the others.
    """
    dice = random.Random(seed)
    found: list[Happening] = []
    rates_of = incidents(assumed)

    def add(at: float, what: What, **more: object) -> None:
        insort(found, Happening(at, more.pop("number", len(found)), what, **more))  # type: ignore[arg-type]

    def strike(kind: str, rate: Rate, first: int, gpus: tuple[int, ...]) -> None:
        own = random.Random(f"{seed}/{kind}/{gpus[0]}")
        for number, at in enumerate(_times(own, rate.on(part), days)):
            name = "nvml-hang" if kind == "nvml-glitch" and own.random() < 1 / 3 else kind
            for gpu in gpus:
                add(at, What.INCIDENT, number=(first * GPUS + gpu) * _MOST + number, gpu=gpu, name=name)

    for gpu in range(GPUS):
        for first, (kind, rate) in enumerate(rates_of.items(), 1):
            strike(kind, rate, first, (gpu,))
        for at in _times(dice, APPLICATIONS.on(part), days):
            for then, where, pod, xids in _job(dice, at, gpu, assumed.others):
                add(then, What.APPLICATION, gpu=where, name=pod, xids=xids)
        for at in _times(dice, 1 / rates.IDLE_RESET_DAYS, days):
            add(at, What.RESET, gpu=gpu)
    for first, (kind, rate) in enumerate(NODE_RATES.items(), 1 + len(rates_of)):
        strike(kind, rate, first, tuple(range(GPUS)))
    restarts = list(_times(random.Random(f"{seed}/restarts"), 1 / assumed.restart_days, days))
    day = rollout + dice.random() / 24
    while day < days:
        restarts.append(day * DAY)
        day += rates.ROLLOUT_DAYS
    for at in restarts:
        add(at, What.RESTART, down=dice.uniform(*rates.DOWN_SECONDS))
    for at in _times(dice, 1 / rates.REBOOT_DAYS, days):
        add(at, What.REBOOT)
    own = random.Random(f"{seed}/counters")
    persistence = own.random() >= assumed.without_persistence
    return NodePlan(seed, part, days, persistence, own.random() < assumed.energy_stays, tuple(found), assumed)


def _times(dice: random.Random, a_day: float, days: float) -> list[float]:
    """Return the random times, in seconds, of an event with this mean number a day."""
    found: list[float] = []
    at = 0.0
    while a_day > 0:
        at += dice.expovariate(a_day)
        if at >= days:
            break
        found.append(at * DAY)
    return found


def _job(dice: random.Random, at: float, gpu: int, others: float) -> list[tuple[float, int, str, tuple[int, ...]]]:
    """Draw the pods of a Job that fails by its own fault: for each its time, its GPU of the node, its name and its Xids.

    The pause before each pod is twice the former (`kubernetes`). Half of the pods are on the same GPU, a quarter on other GPUs of
    this node. The rest would be on other nodes, and is left out, since those nodes have their own jobs. `others` is the share of
    jobs with an Xid of `faults.OTHER_XIDS`.
    """
    again = 1 - 1 / rates.TRIES_A_JOB
    owner = f"team-{dice.randrange(20)}/train-{dice.randrange(10**6)}"
    found: list[tuple[float, int, str, tuple[int, ...]]] = []
    pause, tries = 10.0, 1
    if dice.random() < others:
        first = dice.choice(OTHER_XIDS)
    else:
        first = dice.choices([xid for xid, _ in APPLICATION_XIDS], [share for _, share in APPLICATION_XIDS])[0]
    while True:
        where = dice.random()
        place = gpu if where < 0.5 or tries == 1 else dice.randrange(GPUS) if where < 0.75 else None
        if place is not None:
            xids = (first, *((45,) if dice.random() < 0.3 else ()))
            name = "".join(dice.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
            found.append((at, place, f"{owner}-{name}", xids))
        if tries == 7 or dice.random() >= again:
            return found
        at += dice.uniform(30, 600) + pause  # the pod runs for some time before it fails
        pause, tries = min(2 * pause, 360.0), tries + 1
