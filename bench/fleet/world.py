"""Simulates one node under one policy on a virtual clock: hardware, pods, operators, and the plugin.

It neither waits nor measures time.

Looks are simulated only if they may have an effect: from a look before an event until no fault is open any more. They are one
second apart while the policy wants this, else 15 s, and increasingly rare the longer the GPU does not change.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import replace

from bench.fleet import rates
from bench.fleet.faults import KINDS, Emission, Incident, Truth
from bench.fleet.hardware import FACTS, Hardware
from bench.fleet.place import Place
from bench.fleet.plan import DAY, GPUS, HOUR, Happening, NodePlan, What
from bench.fleet.policies import Policy
from bench.fleet.tally import Tally
from gpu_plugin.health.observation import ApplicationError, Fault, Order, XidEvent

POLL, SOON, SLOWER = 15.0, 1.0, 0.25
"""Seconds between two looks, seconds between looks that the policy wants soon, and the least pause as a share of the time since
the last change."""

CALM = 20.0
"""Seconds without an open fault after which there are no more looks."""


_SOMEBODYS = (31, 13, 43, 8, 32, 39, 69)
"""Xids for which the plugin determines the pods that held the GPU."""

_STEPS = ("reset", "reboot", "replace")


def simulate(plan: NodePlan, policy: Policy) -> Tally:
    """Return the results of the policy on this node."""
    node = _Node(plan, policy)
    node.run()
    return node.tally


class _Node:
    def __init__(self, plan: NodePlan, policy: Policy) -> None:
        self.plan = plan
        self.policy = policy
        self.end = plan.days * DAY
        self.tally = Tally()
        self.now = 0.0
        self._opening = 1
        self._down_until = 0.0
        assumed = plan.assumed
        self._places = [
            Place(
                Hardware(
                    plan.part,
                    plan.energy_stays,
                    self._counting(),
                    assumed.counts_recoveries,
                    assumed.heat_below,
                    assumed.heat_spread,
                )
            )
            for _ in range(GPUS)
        ]
        self._kinds = {
            name: replace(kind, **assumed.kinds.get(name, {}))  # type: ignore[arg-type]
            for name, kind in KINDS.items()
        }
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def run(self) -> None:
        for happening in self.plan.happenings:
            self._at(happening.at, lambda it=happening: self._happen(it))  # type: ignore[misc]
        while self._queue and self._queue[0][0] < self.end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = self.end
        for place in self._places:
            place.account(self.tally, self.now)
        self.tally.hours = GPUS * self.end / HOUR
        self.tally.restarts = self.policy.restarts.gpus
        self.tally.standing, self.tally.longer = self.policy.restarts.standing, self.policy.restarts.longer
        self.tally.changed = dict(self.policy.restarts.changed)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, action))

    def _happen(self, it: Happening) -> None:
        if it.what is What.INCIDENT:
            self._strike(it)
        elif it.what is What.APPLICATION:
            if self._places[it.gpu].offered and self._places[it.gpu].truth is not Truth.BROKEN:
                self._stir(it.gpu)
                for xid in it.xids:
                    self._xid(it.gpu, xid, it.name)
        elif it.what is What.RESTART:
            self._down_until = self.now + it.down
            self._at(self.now + it.down, self._restart)
        elif it.what is What.REBOOT:
            self._reboot()
        elif self._places[it.gpu].offered and self._places[it.gpu].truth is not Truth.BROKEN:
            self._reset(it.gpu)

    # Hardware

    def _strike(self, it: Happening) -> None:
        gpu, place = it.gpu, self._places[it.gpu]
        self._stir(gpu)
        dice = random.Random(f"{self.plan.seed}/{it.number}")
        incident = Incident.begun(self._kinds[it.name], self.now, it.number, dice)
        name = it.name if incident.truth is Truth.BROKEN else f"{it.name} (works)"
        self.tally.incidents[name] = self.tally.incidents.get(name, 0) + 1
        place.hardware.strike(incident)
        place.hardware.count(incident)
        if incident.ends < self.end:
            self._at(incident.ends, lambda: self._passed(gpu))
        self._refresh(gpu)
        for emission in incident.kind.begins:
            if dice.random() < emission.chance and (incident.truth is Truth.BROKEN or not emission.breaks):
                self._emit(gpu, incident, emission)
        self._ask(gpu, incident)
        self._recur(gpu, incident)
        self._try_restart(gpu, dice)
        if incident.looks is Fault.LOST:
            self.policy.lost(gpu)
            for each in range(GPUS):
                self._refresh(each)

    def _try_restart(self, gpu: int, dice: random.Random) -> None:
        """Plan a restart from a second to half a day later, since random restarts seldom occur during a fault."""

        def restarted() -> None:
            if self.now < self._down_until or not self._places[gpu].watched:
                return
            self.policy.restart_one(gpu, self.now, killed=dice.random() < 0.5)
            self._look_now(gpu)
            self._refresh(gpu)
            self._touch(gpu)

        if self.policy.looks:
            self._at(self.now + math.exp(dice.uniform(0, math.log(DAY / 2))), restarted)

    def _ask(self, gpu: int, incident: Incident) -> None:
        """Make the driver request the recovery for a broken GPU after a delay, with Xid 154, if the driver supports it."""
        broken = incident.truth is Truth.BROKEN
        if not broken or incident.action or not incident.kind.action or not FACTS[self.plan.part].says_action:
            return
        delay = self._of_incident(gpu, "action").expovariate(1.0) * self.plan.assumed.action_seconds
        incident.action, incident.action_at = incident.kind.action, self.now + delay
        self._emit(gpu, incident, Emission(154, after=delay))

    def _emit(self, gpu: int, incident: Incident, emission: Emission, pod: str = "") -> None:
        def raised() -> None:
            if incident in self._places[gpu].hardware.incidents:
                self._xid(gpu, emission.xid, pod)

        for _ in range(incident.dice.randint(1, emission.lines)):
            self._at(self.now + emission.after + incident.dice.uniform(0, emission.spread), raised)

    def _recur(self, gpu: int, incident: Incident) -> None:
        """Repeat the incident at random."""
        if incident.dice.random() >= incident.kind.recurs:
            return

        def again() -> None:
            if incident in self._places[gpu].hardware.incidents:
                self._count(gpu, incident)
                for emission in incident.kind.begins[:1]:
                    self._emit(gpu, incident, emission)
                self._recur(gpu, incident)

        self._at(self.now + incident.dice.expovariate(1 / incident.kind.repeats), again)

    def _count(self, gpu: int, incident: Incident) -> None:
        if incident.kind.counts:
            self._stir(gpu)
            self._places[gpu].hardware.count(incident)

    def _passed(self, gpu: int) -> None:
        self._stir(gpu)
        self._places[gpu].hardware.pass_by(self.now)
        self._refresh(gpu)
        self._touch(gpu)

    def _xid(self, gpu: int, xid: int, pod: str) -> None:
        """Raise an Xid. It is lost while the plugin is down."""
        if self.now < self._down_until:
            return
        self.policy.see(gpu, XidEvent(xid), self.now)
        if pod and xid in _SOMEBODYS:
            self.policy.see(gpu, ApplicationError(xid, frozenset({pod})), self.now)
        self._refresh(gpu)
        self._touch(gpu)

    # Looks

    def _stir(self, gpu: int) -> None:
        """Make the last look before an event, which was not simulated yet."""
        place = self._places[gpu]
        if not self.policy.looks:
            return
        if not place.watched:
            place.watched = True
            self.policy.watch(gpu, FACTS[self.plan.part])
            place.looked = -1.0
        if place.look == 0 and self.now >= self._down_until:
            seen = max(place.looked, self.now - POLL * (self.now * 7919 % 1))
            place.looked = seen
            self.policy.see(gpu, place.hardware.sample(seen, loaded=place.offered), seen)
        self._touch(gpu)

    def _touch(self, gpu: int) -> None:
        """Resume looks at once."""
        place = self._places[gpu]
        if self.policy.looks and place.watched:
            place.moved = self.now
            self._look_in(gpu, 0.1)

    def _look_in(self, gpu: int, seconds: float) -> None:
        place = self._places[gpu]
        self._number += 1
        place.look = mine = self._number
        self._at(self.now + seconds, lambda: self._look(gpu) if place.look == mine else None)

    def _look(self, gpu: int) -> None:
        place = self._places[gpu]
        place.look = 0
        if self.now < self._down_until:
            self._look_in(gpu, self._down_until - self.now + 0.1)
            return
        if self.now > place.looked:
            place.looked = self.now
            loaded = place.offered or self.now - place.since < 120
            sample = place.hardware.sample(self.now, loaded=loaded)
            self.policy.see(gpu, sample, self.now)
            self._refresh(gpu)
        else:
            sample = None
        waited = self.now - place.moved
        if self.policy.curious(gpu):
            self._look_in(gpu, SOON)
        elif self.policy.open(gpu) or waited < CALM or (sample is not None and sample.fault):
            self._look_in(gpu, max(POLL, SLOWER * waited))

    # Accounts, pods, operators

    def _refresh(self, gpu: int) -> None:
        """Record changes of the GPU's state, and start their consequences."""
        place = self._places[gpu]
        truth, offered = place.hardware.truth, self.policy.offered(gpu)
        if offered == place.offered and truth is place.truth:
            if not offered:
                place.why = self.policy.why(gpu)
            return
        place.account(self.tally, self.now)
        place.moved = self.now if offered != place.offered else place.moved
        place.truth, place.offered = truth, offered
        place.cause, place.why = place.hardware.cause, "" if offered else self.policy.why(gpu)
        if not offered and not place.awaited:
            place.awaited = True
            self._in_hours(gpu, "operator", self.plan.assumed.operator_hours, lambda: self._answered(gpu))
        if truth is Truth.BROKEN and offered:
            self._suffer(gpu)

    def _in_hours(self, gpu: int, who: str, median: float, action: Callable[[], None]) -> None:
        """Run an action after a random delay. The n-th delay for an incident is the same under every policy."""
        dice = self._of_incident(gpu, who)
        self._at(self.now + HOUR * median * dice.lognormvariate(0, rates.OPERATOR_SPREAD), action)

    def _of_incident(self, gpu: int, what: str) -> random.Random:
        """Return random numbers for the n-th action of this kind for the GPU's present incident."""
        place = self._places[gpu]
        key = f"{gpu}/{place.hardware.cause[1]}/{what}"
        place.times[key] = place.times.get(key, 0) + 1
        return random.Random(f"{self.plan.seed}/{key}/{place.times[key]}")

    def _suffer(self, gpu: int) -> None:
        """Start pods on a broken GPU, and plan a user's complaint."""
        place = self._places[gpu]
        if not place.complained:
            place.complained = True
            hours = rates.SILENT_HOURS if place.hardware.silent else self.plan.assumed.complaint_hours
            self._in_hours(gpu, "complaint", hours, lambda: self._complained(gpu))
        if not place.trying:
            place.trying = True
            self._next_pod(gpu, 0)

    def _next_pod(self, gpu: int, number: int) -> None:
        place = self._places[gpu]
        worst = max(place.hardware.incidents, key=lambda incident: incident.truth)
        wait = worst.dice.expovariate(
            1 / (HOUR * (rates.POD_HOURS if worst.kind.silent else self.plan.assumed.try_hours))
        )

        def begins() -> None:
            place.trying = False
            if not (place.truth is Truth.BROKEN and place.offered):
                return
            self.tally.lost += 1
            suffered = max(place.hardware.incidents, key=lambda incident: incident.truth)
            owner = f"team-{suffered.number % 20}/job-{number // 2}"
            self._count(gpu, suffered)
            for emission in suffered.kind.pods:
                if suffered.dice.random() < emission.chance:
                    self._ask(gpu, suffered)
                    self._emit(gpu, suffered, emission, f"{owner}-{_suffix(suffered.dice)}")
            if place.truth is Truth.BROKEN and place.offered and not place.trying:
                place.trying = True
                self._next_pod(gpu, number + 1)

        self._at(self.now + wait, begins)

    def _answered(self, gpu: int) -> None:
        """An operator comes because of an Unhealthy GPU, and repairs it if it is still Unhealthy."""
        place = self._places[gpu]
        place.awaited = False
        if not place.offered:
            self._repair(gpu)

    def _complained(self, gpu: int) -> None:
        place = self._places[gpu]
        place.complained = False
        if place.truth is Truth.BROKEN:
            self._repair(gpu)

    def _repair(self, gpu: int) -> None:
        """Simulate an operator's repair of a GPU: a reset; if that does not help, a reboot; if that does not help, a replacement.

        After each step the GPU is tested. If the GPU passes and the plugin still holds it back, the operator overrides the
        plugin, or restarts a plugin without an override. If the GPU fails the test, the next step follows. If the GPU is broken
        although it passed, the next repair within a week begins one step later.
        """
        place = self._places[gpu]
        if self.now - place.stepped > 7 * DAY:
            place.step = 0
        step = max(place.step, 1 if place.hardware.gone else 0)
        while True:
            self._take(gpu, step)
            place.step, place.stepped = min(step + 1, len(_STEPS) - 1), self.now
            luck = self._of_incident(gpu, "test").random()
            finds = rates.CORRUPTION_FOUND if place.hardware.silent else self.plan.assumed.diagnosed
            if not place.hardware.gone and (place.hardware.truth is not Truth.BROKEN or luck > finds):
                break
            step = place.step
        self._at(self.now + self.plan.assumed.test_seconds, lambda: self._tested(gpu))

    def _take(self, gpu: int, step: int) -> None:
        """Do one step of a repair."""
        place = self._places[gpu]
        self.tally.steps[_STEPS[step]] = self.tally.steps.get(_STEPS[step], 0) + 1
        if step == 0:
            self._reset(gpu)
        elif step == 1:
            self._reboot()
        else:
            place.account(self.tally, self.now)
            place.hardware.replaced(self.now)
            self.policy.replace(gpu, FACTS[self.plan.part])
            if place.watched:
                self._look_now(gpu)
            self._refresh(gpu)
            self._touch(gpu)

    def _tested(self, gpu: int) -> None:
        """The GPU passed the operator's test, so it must be offered. Check all GPUs of the node for further repairs."""
        if self.now < self._down_until:
            self._at(self._down_until + 1, lambda: self._tested(gpu))
            return
        if not self._places[gpu].offered:
            self.tally.steps["vouch"] = self.tally.steps.get("vouch", 0) + 1
            if self.policy.looks:
                self.policy.vouch(gpu)
            else:
                self._restart()
            self._refresh(gpu)
        for each in range(GPUS):
            self._follow_up(each)

    def _follow_up(self, gpu: int) -> None:
        """Plan the next repair of a GPU that is still Unhealthy, and the failures of pods on a GPU that is still broken."""
        place = self._places[gpu]
        if not place.offered and not place.awaited:
            place.awaited = True
            self._in_hours(gpu, "operator", self.plan.assumed.operator_hours, lambda: self._answered(gpu))
        elif place.offered and place.truth is Truth.BROKEN:
            self._suffer(gpu)

    def _reset(self, gpu: int) -> None:
        """Release, reset and resume the GPU, as in docs/health.md."""
        place = self._places[gpu]
        self._stir(gpu)
        if self.policy.looks:
            self.policy.see(gpu, Order("release"), self.now)
        place.hardware.reset(self.now)
        if self.policy.looks:
            self.policy.see(gpu, Order("resume"), self.now)
            self._look_now(gpu)
        self._refresh(gpu)
        self._touch(gpu)

    def _reboot(self) -> None:
        self._opening += 1
        for place in self._places:
            place.account(self.tally, self.now)
            place.hardware.reboot(self.now)
            place.hardware.counting = self._counting()
        absent = frozenset(gpu for gpu, place in enumerate(self._places) if place.hardware.lost)
        self.policy.reboot(self._unreachable() - absent, absent, self.now)
        self._down_until = self.now
        self._begin()

    def _restart(self) -> None:
        self._opening += 1
        dice = random.Random(f"{self.plan.seed}/opening/{self._opening}")
        for place in self._places:
            if not self.plan.persistence and dice.random() < rates.IDLE:
                place.hardware.restart_counters(self.now)
            place.hardware.counting = self._counting()
        self.policy.restart(self._unreachable(), self.now, killed=dice.random() < 0.5)
        self._down_until = self.now
        self._begin()

    def _unreachable(self) -> frozenset[int]:
        return frozenset(gpu for gpu, place in enumerate(self._places) if place.hardware.unreachable)

    def _begin(self) -> None:
        """Make the plugin's first look at every GPU, before the kubelet gets the list."""
        for gpu, place in enumerate(self._places):
            if place.watched:
                self._look_now(gpu)
            self._refresh(gpu)
            if place.watched:
                self._touch(gpu)
            self._follow_up(gpu)

    def _look_now(self, gpu: int) -> None:
        place = self._places[gpu]
        place.looked = self.now
        self.policy.see(gpu, place.hardware.sample(self.now, loaded=place.offered), self.now)

    def _counting(self) -> int:
        return 0 if self.plan.persistence else self._opening


def _suffix(dice: random.Random) -> str:
    return "".join(dice.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
