"""`python -m bench.fleet`: simulates a fleet under our policy, NVIDIA's and Google's, and prints the results of each."""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.fleet import rates
from bench.fleet.plan import GPUS, drawn
from bench.fleet.policies import POLICIES, default_policy, policy_for
from bench.fleet.rates import ASSUMED, Assumed, Part
from bench.fleet.report import World, render, together
from bench.fleet.sensitivity import FLIPS, VARIED, headed, line
from bench.fleet.tally import Tally
from bench.fleet.world import simulate

MANY_DAYS, FEWER_DAYS = 1_000_000, 200_000
"""GPU-days of a run, and of each line of the sensitivity table."""

YEAR = 365.0
"""The most days for which a node is simulated."""


def world(seed: int, gpu_days: float, assumed: Assumed = ASSUMED) -> World:
    """Return the results of every policy for this number of GPU-days. Half of the nodes have each GPU model."""
    nodes = max(len(Part), math.ceil(gpu_days / GPUS / YEAR))
    days = gpu_days / GPUS / nodes
    rollout = random.Random(seed).uniform(0, rates.ROLLOUT_DAYS)
    settings = default_policy()
    tallies = {name: Tally() for name in POLICIES}
    for node in range(nodes):
        plan = drawn(f"{seed}/{node}", list(Part)[node % len(Part)], days, rollout, assumed)
        for name, tally in tallies.items():
            tally.add(simulate(plan, policy_for(name, GPUS, settings)))
    return World(seed, tallies)


def main(arguments: Sequence[str]) -> int:
    """Run the simulation and return the exit status."""
    asked = _arguments(arguments)
    if asked.sensitivity:
        days = asked.gpu_days or FEWER_DAYS
        print(f"{days:,.0f} GPU-days under each policy for each line, seed {asked.seed}\n", flush=True)
        print(headed(), flush=True)
        for words, assumed in VARIED:
            print(line(words, world(asked.seed, days, assumed).tallies), flush=True)
        print("\n" + FLIPS)
        return 0
    days = asked.gpu_days or MANY_DAYS
    worlds = [world(asked.seed + at, days / asked.seeds) for at in range(asked.seeds)]
    print(render(worlds))
    if asked.json:
        content = {
            "policies": {name: _plain(tally) for name, tally in together(worlds).items()},
            "seeds": {one.seed: {name: _plain(tally) for name, tally in one.tallies.items()} for one in worlds},
        }
        asked.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _plain(tally: Tally) -> dict[str, object]:
    """Convert a tally for JSON: join keys of several parts."""
    found = asdict(tally)
    for name in ("held_back", "held"):
        found[name] = {" after ".join(key): value for key, value in getattr(tally, name).items()}
    return found


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet",
        description="Simulate a fleet whose true state is known, under several policies of the health that the kubelet gets.",
    )
    parser.add_argument(
        "--gpu-days",
        type=_days,
        help=f"GPU-days in all [{MANY_DAYS:,}], or for each line of --sensitivity [{FEWER_DAYS:,}]",
    )
    parser.add_argument("--seed", type=int, default=1, help="the first seed [%(default)s]")
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default=10,
        help="number of worlds with these GPU-days in all, a seed each [%(default)s]",
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument(
        "--sensitivity", action="store_true", help="vary one assumption at a time, and print the aims that are not met"
    )
    return parser.parse_args(arguments)


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and a billion")
    return days


def _seeds(text: str) -> int:
    seeds = int(text)
    if not 1 <= seeds <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 1000")
    return seeds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
