"""Round trips of GetPreferredAllocation for every size, and the number of driver calls during them."""

import itertools
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from bench.calls import Side, two_processors
from bench.calls import preferred as asking
from bench.counted import Count
from bench.kubelet import dial, unary
from bench.node import Node as Served
from bench.node import serving
from bench.plan import PATIENCE, MeasurementError, Plan
from bench.probed import probed, whole_gpus
from bench.process import running
from bench.quantiles import median, median_ratio, percentile
from bench.table import Judged, Row, number
from gpu_plugin.devices.node import Node
from gpu_plugin.kubelet import messages, wire
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology

FIGURE = "GetPreferredAllocation"

MIXED, MESH, EIGHTS = "mixed-16", "dgx2-16", ("hgx-h100", "dgx1-v100")
"""Profiles: 16 GPUs with almost no equal pairs, 16 GPUs that all reach each other, and profiles with 8 GPUs."""

ALL, SOME = "all free", "some free, some required"

DIFFERENT = 16
"""The number of requests of each kind."""

SHARE = 6
"""Each of the 32 kinds gets a sixth of the plan's calls."""

QUIET = 0.5
"""Seconds without a driver call after which the daemon has probably checked all GPUs. The next check is an hour away."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the ids in the best answer."""

    available: Sequence[str]
    required: Sequence[str]
    best: Sequence[str]

    @property
    def request(self) -> bytes:
        """The encoded request of one container."""
        return asking(self.available, self.required, len(self.best))

    def check(self, answer: bytes) -> None:
        """Raises MeasurementError if the answer is not the best, since an empty answer or a guess would also be fast."""
        [container] = messages.decode(messages.PreferredAllocationResponse, answer).container_responses
        if container.device_ids != list(self.best):
            raise MeasurementError(f"{container.device_ids} is not the expected answer: {self}")


@dataclass(frozen=True, slots=True)
class Kind:
    """All requests of one size, for the daemon and for a bare server that sends the same number of bytes."""

    which: str
    size: int
    served: Side
    bare: Side


@dataclass(slots=True)
class Measured:
    """The results of one node, and the number of the daemon's driver calls while it answered."""

    kinds: list[Kind]
    driver_calls: int = 0


def every_size(plan: Plan, directory: Path) -> list[Row]:
    """Return the rows of all profiles. The last row is about driver calls."""
    directory.mkdir()
    with two_processors() as (client, server):
        os.sched_setaffinity(0, client)
        found = {name: _measured(directory / name, name, server, plan) for name in (MIXED, MESH, *EIGHTS)}
    mixed = found[MIXED].kinds
    calls = sum(len(kind.served.taken) for measured in found.values() for kind in measured.kinds)
    return [
        *(_row(f"{MIXED}, {which}", [kind for kind in mixed if kind.which == which]) for which in (ALL, SOME)),
        *(_worst(name, found[name].kinds, 5, Judged.P99) for name in (MIXED, MESH)),
        *(_worst(name, found[name].kinds, 0.5, Judged.P50) for name in EIGHTS),
        Row(
            f"{FIGURE}: driver calls",
            "calls",
            calls,
            sum(measured.driver_calls for measured in found.values()),
            budget=0,
            note="while it answered, but for the thread that waits for events all the time",
        ),
    ]


def questions(node: Node, dice: random.Random) -> Mapping[tuple[str, int], list[Question]]:
    """Return requests for the node's whole GPUs, by the free GPUs (ALL or SOME) and the requested size.

    The ids are in random order. For SOME, at least the requested number of GPUs is free, and any number of the requested GPUs is
    required, from 0 to all.
    """
    placement, devices = Placement.of(Topology.of(node)), whole_gpus(node)
    order = {device.id: at for at, device in enumerate(devices)}
    asked: dict[tuple[str, int], list[Question]] = {}
    for which, size in itertools.product((ALL, SOME), range(1, len(devices) + 1)):
        asked[which, size] = []
        for _ in range(DIFFERENT):
            available = dice.sample(list(order), len(order) if which == ALL else dice.randint(size, len(order)))
            required = dice.sample(available, 0 if which == ALL else dice.randint(0, size))
            best = preferred(available, required, size, devices, order, placement)
            asked[which, size].append(Question(available, required, best))
    return asked


def _measured(directory: Path, profile: str, server: set[int], plan: Plan) -> Measured:
    """Send every kind of request in turn, each with its share of the plan's calls."""
    asked = questions(probed(profile), random.Random(16))
    shared = directory.with_suffix(".calls")
    shared.touch()
    with ExitStack() as stack:
        count = stack.enter_context(closing(Count(shared)))
        program = (sys.executable, "-m", "bench.counted", str(shared))
        node = stack.enter_context(serving(directory, "--health-poll-interval=1h", profile=profile, program=program))
        measured = Measured(_kinds(stack, node, server, asked))
        _await_quiet(count)
        for _ in range(plan.rounds):
            for kind in measured.kinds:
                before = count.read()
                kind.served.round(max(1, plan.calls // SHARE))
                measured.driver_calls += count.read() - before
                kind.bare.round(max(1, plan.calls // SHARE))
    return measured


def _kinds(
    stack: ExitStack, node: Served, server: set[int], asked: Mapping[tuple[str, int], list[Question]]
) -> list[Kind]:
    """Return every kind, after both sides have answered each request once."""
    call = unary(stack.enter_context(dial(node.registration.socket)), wire.PREFERRED)
    answers: dict[int, bytes] = {}
    for (_, size), kind in asked.items():
        for question in kind:
            answers[size] = call(question.request)
            question.check(answers[size])
    socket = node.directory.with_suffix(".sock")
    fixed = [f"/bare/{size}={answer.hex()}" for size, answer in answers.items()]
    command = [sys.executable, "-m", "bench.bare_server", str(socket), *fixed]
    bare = stack.enter_context(running(command, node.directory / "bare-log"))
    if not bare.output.readline():
        raise MeasurementError(f"the bare server does not start: {bare.log_tail()}")
    channel = stack.enter_context(dial(socket))
    for process in (node.daemon, bare):
        os.sched_setaffinity(process.pid, server)
    kinds = []
    for (which, size), kind in asked.items():
        requests = [question.request for question in kind]
        compared = unary(channel, f"/bare/{size}")
        for request in requests:
            compared(request)
        served, beside = ((node.daemon, call), (bare, compared))
        kinds.append(Kind(which, size, *(Side(*each, itertools.cycle(requests)) for each in (served, beside))))
    return kinds


def _await_quiet(count: Count) -> None:
    """Wait until the daemon makes no more driver calls after its start."""
    patience = time.monotonic() + PATIENCE
    seen = -1
    while count.read() != seen:
        if time.monotonic() > patience:
            raise MeasurementError(f"the daemon keeps calling the driver: {count.read()} calls so far")
        seen = count.read()
        time.sleep(QUIET)
    if not seen:
        raise MeasurementError("no driver call was counted, although GPUs were found")


def _worst(profile: str, kinds: Sequence[Kind], budget: float, judged: Judged) -> Row:
    """Return the row of the kind of request with the greatest percentile; `judged` selects the percentile."""
    percent = 99 if judged is Judged.P99 else 50
    worst = max(kinds, key=lambda kind: percentile(kind.served.taken, percent))
    return _row(f"{profile}, worst size", [worst], budget, judged, f"{worst.size}, {worst.which}; ")


def _row(
    name: str, kinds: Sequence[Kind], budget: float | None = None, judged: Judged = Judged.P50, note: str = ""
) -> Row:
    """Return the row of all calls of these kinds together."""
    served, bare = ([taken * 1000 for side in sides for taken in side.taken] for sides in _sides(kinds))
    rounds = ([p50 for side in sides for p50 in side.p50] for sides in _sides(kinds))
    cpu = median([each for kind in kinds for each in kind.served.cpu])
    return Row(
        f"{FIGURE}, {name}",
        "ms",
        len(served),
        percentile(served, 50),
        percentile(served, 99),
        budget,
        judged,
        percentile(bare, 50),
        median_ratio(*rounds),
        note=f"{note}server CPU {cpu:.0f} us a call, bare p99 {number(percentile(bare, 99))}",
        series={
            "size": [kind.size for kind in kinds],
            "p50_ms": [percentile(kind.served.taken, 50) * 1000 for kind in kinds],
            "p99_ms": [percentile(kind.served.taken, 99) * 1000 for kind in kinds],
        },
    )


def _sides(kinds: Sequence[Kind]) -> tuple[list[Side], list[Side]]:
    return [kind.served for kind in kinds], [kind.bare for kind in kinds]
