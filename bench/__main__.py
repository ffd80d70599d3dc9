"""`python -m bench`: measures all figures and prints tables. The exit status is 1 if a budget or a measurement is missed."""

import argparse
import compileall
import dataclasses
import json
import os
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import (
    calls,
    cdi,
    footprint,
    health,
    image,
    lifecycle,
    lists,
    observing,
    page,
    placement,
    polls,
    probes,
    quality,
    rounds,
    scrape,
    shared,
    sockets,
    stalls,
)
from bench.plan import Plan
from bench.process import PROFILE, ROOT, stolen
from bench.table import Comparison, Row, render, side_by_side, verdict
from gpu_plugin import __version__

Figures = Callable[[Plan, Path], Sequence[Row | Comparison]]

FIGURES: dict[str, Figures] = {
    "start": lifecycle.start_and_end,
    "calls": calls.measure,
    "cdi": cdi.specifications,
    "cdi-calls": cdi.allocate_by_name,
    "cdi-start": cdi.start,
    "image": image.start,
    "xid": health.xid_to_streams,
    "restart": lifecycle.kubelet_restart,
    "footprint": footprint.memory_and_idling,
    "listener": probes.measure,
    "scrape": scrape.measure,
    "page": page.measure,
    "observing": observing.together,
    "kube": observing.kubernetes_client,
    "unasked": observing.unasked,
    "polls": polls.every_signal,
    "rounds": rounds.measure,
    "list": lists.health_change,
    "gpu": lists.gpu_change,
    "placement": placement.every_size,
    "ids": lists.many_ids,
    "shared": shared.many_devices,
    "sockets": sockets.pods_across_sockets,
    "stalls": stalls.measure,
    "quality": quality.pods_at_random,
}
"""The measuring functions by name, in the order of the tables. Each gets the path of a directory that does not exist yet."""


def main(arguments: list[str]) -> int:
    """Run the measurements and return the exit status."""
    asked = _arguments(arguments)
    plan = Plan(asked.rounds, asked.calls)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that child processes are ended
    for package in ("gpu_plugin", "bench"):
        compileall.compile_dir(ROOT / package, quiet=1)
    measured: list[Row | Comparison] = []
    unmeasured = []
    before = stolen()
    with tempfile.TemporaryDirectory(prefix="gp-") as scratch:
        for name in asked.only or FIGURES:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            try:
                measured += FIGURES[name](plan, Path(scratch) / name)
            except Exception:  # noqa: BLE001 - the others can still be measured
                traceback.print_exc()
                unmeasured.append(name)
    head = _head(plan, before)
    print(head)
    rows = [each for each in measured if isinstance(each, Row)]
    comparisons = [each for each in measured if isinstance(each, Comparison)]
    if rows:
        print(render(rows))
    if comparisons:
        print(side_by_side(comparisons))
    print(verdict(measured, unmeasured))
    if asked.json:
        content = {
            "head": head,
            "unmeasured": unmeasured,
            "rows": [dataclasses.asdict(row) for row in rows],
            "comparisons": [dataclasses.asdict(each) for each in comparisons],
        }
        asked.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if unmeasured or any(each.missed() for each in measured) else 0


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Speed and size of gpu-plugin, and how good its choices are."
    )
    parser.add_argument("--rounds", type=_positive, default=Plan().rounds, help="rounds of each figure [%(default)s]")
    parser.add_argument(
        "--calls", type=_positive, default=Plan().calls, help="calls of a kind in a round [%(default)s]"
    )
    parser.add_argument("--only", action="append", choices=list(FIGURES), help="measure only this; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and their samples to this file")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _head(plan: Plan, before: tuple[float, float]) -> str:
    """Return the first line: the version and the machine, its load in the last minute, and the time stolen by the host.

    Load and stolen time, which is counted since `before`, show how reliable the figures are.
    """
    steal, total = (now - then for now, then in zip(stolen(), before, strict=True))
    cores = len(os.sched_getaffinity(0))
    machine = f"{cores} cores, load {os.getloadavg()[0]:.1f}, steal {steal / total if total else 0:.0%}"
    python = f"{platform.python_implementation()} {platform.python_version()}, Linux {platform.release()}"
    return (
        f"gpu-plugin {__version__}, {PROFILE} simulated; {machine}; {python}; {plan.rounds} rounds, {plan.calls} calls"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
