"""Round trips of Allocate and GetPreferredAllocation, in turn with a bare grpclib server that sends the same bytes."""

import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.kubelet import dial, unary
from bench.node import Node, serving
from bench.plan import MeasurementError, Plan
from bench.process import Child, cpu_seconds, running
from bench.quantiles import median, median_ratio, percentile
from bench.table import Row
from gpu_plugin.kubelet import messages, wire

WARM_UP = 64
"""Untimed calls of each kind before the first timed call. There are fewer different requests of a kind."""

PREFERRED_SIZE = 4


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of call. Its requests are encoded before and sent in turn.

    The optional budgets are for p50 in ms, and for the ratios of time and of server CPU to a bare call.
    """

    figure: str
    path: str
    requests: Sequence[bytes]
    budget: float | None = None
    ratio_budget: float | None = None
    cpu_budget: float | None = None


@dataclass(slots=True)
class Side:
    """One of the two servers for a kind of call.

    `p50` and `p99` have microseconds for each call, and `cpu` microseconds of server CPU for each call, one value for each round.
    `taken` has the seconds of every call.
    """

    process: Child
    call: Callable[[bytes], bytes]
    requests: "itertools.cycle[bytes]"
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)

    def round(self, calls: int) -> None:
        """Make one round of calls, one after the other."""
        requests = list(itertools.islice(self.requests, calls))
        call, clock = self.call, time.perf_counter
        taken = []
        cpu = cpu_seconds(self.process.pid)
        gc.disable()  # only in the client; the server's garbage collection runs
        try:
            for request in requests:
                began = clock()
                call(request)
                taken.append(clock() - began)
        finally:
            gc.enable()
        self.cpu.append((cpu_seconds(self.process.pid) - cpu) / calls * 1e6)
        self.p50.append(percentile(taken, 50) * 1e6)
        self.p99.append(percentile(taken, 99) * 1e6)
        self.taken += taken


def measure(plan: Plan, directory: Path) -> list[Row]:
    """Return the rows of all kinds of calls."""
    directory.mkdir()
    with ExitStack() as stack:
        client, server = stack.enter_context(two_processors())
        os.sched_setaffinity(0, client)
        plain = stack.enter_context(serving(directory / "plain"))
        specs = stack.enter_context(serving(directory / "specs", "--pass-device-specs=true"))
        kinds = [
            (plain, Kind("Allocate 1", wire.ALLOCATE, [allocate([i]) for i in plain.ids], None, 1.5, 1.4)),
            (
                plain,
                Kind("GetPreferredAllocation 4 of 8", wire.PREFERRED, preferred_requests(plain.ids), None, 1.8, 1.7),
            ),
            (specs, Kind("Allocate 1, device specs", wire.ALLOCATE, [allocate([i]) for i in specs.ids])),
            (plain, Kind("Allocate 8", wire.ALLOCATE, [allocate(plain.ids)])),
        ]
        calls = [_connected(stack, node, kind) for node, kind in kinds]
        answers = [_checked(kind, call) for (_, kind), call in zip(kinds, calls, strict=True)]
        socket = directory / "bare.sock"
        paths = [f"/bare/{at}" for at in range(len(kinds))]
        fixed = [f"{path}={answer.hex()}" for path, answer in zip(paths, answers, strict=True)]
        bare = stack.enter_context(
            running([sys.executable, "-m", "bench.bare_server", str(socket), *fixed], directory / "bare-log")
        )
        if not bare.output.readline():
            raise MeasurementError(f"the bare server does not start: {bare.log_tail()}")
        channel = stack.enter_context(dial(socket))
        for process in (plain.daemon, specs.daemon, bare):
            os.sched_setaffinity(process.pid, server)
        pairs = [
            (
                Side(node.daemon, call, itertools.cycle(kind.requests)),
                Side(bare, unary(channel, path), itertools.cycle(kind.requests)),
            )
            for (node, kind), call, path in zip(kinds, calls, paths, strict=True)
        ]
        for side in itertools.chain.from_iterable(pairs):
            for request in itertools.islice(side.requests, WARM_UP):
                side.call(request)
        for _ in range(plan.rounds):
            for served, compared in pairs:
                served.round(plan.calls)
                compared.round(plan.calls)
        return [
            row
            for (_, kind), (served, compared) in zip(kinds, pairs, strict=True)
            for row in (_row(kind, plan, served, compared), *_cpu_row(kind, plan, served, compared))
        ]


@contextmanager
def two_processors() -> Iterator[tuple[set[int], set[int]]]:
    """Give one processor for the client and another for the servers, if there are two. Restores the affinity at the end.

    A call goes back and forth between two processes. Fixed processors keep the scheduler's choice out of the figures.
    """
    allowed = os.sched_getaffinity(0)
    first, *others = sorted(allowed)
    try:
        yield {others[0] if others else first}, {first}
    finally:
        os.sched_setaffinity(0, allowed)


def allocate(ids: Sequence[str]) -> bytes:
    """Encode an AllocateRequest of one container."""
    return bytes(messages.AllocateRequest([messages.ContainerAllocateRequest(list(ids))]))


def preferred(available: Sequence[str], must_include: Sequence[str], size: int) -> bytes:
    """Encode a PreferredAllocationRequest of one container."""
    container = messages.ContainerPreferredAllocationRequest(list(available), list(must_include), size)
    return bytes(messages.PreferredAllocationRequest([container]))


def preferred_requests(ids: Sequence[str]) -> list[bytes]:
    """Return requests for 4 of all ids, each with another order of the ids. Every second request has one or two required ids."""
    dice = random.Random(8)
    return [
        preferred(dice.sample(ids, len(ids)), dice.sample(ids, required), PREFERRED_SIZE)
        for required in (0, 1, 0, 2) * (WARM_UP // 4)
    ]


def _connected(stack: ExitStack, node: Node, kind: Kind) -> Callable[[bytes], bytes]:
    channel = stack.enter_context(dial(node.registration.socket))
    return unary(channel, kind.path)


def _checked(kind: Kind, call: Callable[[bytes], bytes]) -> bytes:
    """Return the answer to the first request after checking all answers, since an error would also be fast."""
    answers = [call(request) for request in kind.requests]
    for answer in answers:
        if kind.path == wire.PREFERRED:
            [chosen] = messages.decode(messages.PreferredAllocationResponse, answer).container_responses
            right = len(set(chosen.device_ids)) == PREFERRED_SIZE
        else:
            [container] = messages.decode(messages.AllocateResponse, answer).container_responses
            right = bool(container.envs) and ("specs" in kind.figure) == bool(container.devices)
        if not right or len(answer) != len(answers[0]):
            raise MeasurementError(f"{kind.figure}: unexpected answer: {answer!r}")
    return answers[0]


def _cpu_row(kind: Kind, plan: Plan, served: Side, bare: Side) -> list[Row]:
    """Return the row for the server CPU of a call, if it has a budget."""
    if kind.cpu_budget is None:
        return []
    return [
        Row(
            f"{kind.figure}: server CPU",
            "us",
            plan.rounds * plan.calls,
            median(served.cpu),
            bare=median(bare.cpu),
            ratio=median_ratio(served.cpu, bare.cpu),
            ratio_budget=kind.cpu_budget,
        )
    ]


def _row(kind: Kind, plan: Plan, served: Side, bare: Side) -> Row:
    return Row(
        kind.figure,
        "ms",
        plan.rounds * plan.calls,
        median(served.p50) / 1000,
        median(served.p99) / 1000,
        kind.budget,
        bare=median(bare.p50) / 1000,
        ratio=median_ratio(served.p50, bare.p50),
        ratio_budget=kind.ratio_budget,
        note=f"server CPU {median(served.cpu):.0f} us a call, bare {median(bare.cpu):.0f}",
        series={
            "p50_us": served.p50,
            "p99_us": served.p99,
            "cpu_us": served.cpu,
            "bare_p50_us": bare.p50,
            "bare_p99_us": bare.p99,
            "bare_cpu_us": bare.cpu,
        },
    )
