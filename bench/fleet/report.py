"""The results of the policies as tables, and the aims that they meet. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.fleet.policies import POLICIES
from bench.fleet.rates import SOURCES
from bench.fleet.tally import Tally
from bench.table import aligned

OURS = next(iter(POLICIES))

SHOWN = 0.05
"""Items with fewer hours are summed up in one row."""


@dataclass(frozen=True, slots=True)
class World:
    """The results of every policy in the world of one seed."""

    seed: int
    tallies: Mapping[str, Tally]


def together(worlds: Sequence[World]) -> dict[str, Tally]:
    """Return the sums over all worlds."""
    found = {name: Tally() for name in POLICIES}
    for world in worlds:
        for name, tally in world.tallies.items():
            found[name].add(tally)
    return found


def missed(tallies: Mapping[str, Tally]) -> list[str]:
    """Return a text for each missed aim."""
    ours, words = tallies[OURS], []
    for name, title in POLICIES.items():
        if name == OURS:
            continue
        other = tallies[name]
        for figure, mine, theirs in (
            ("broken, handed out", total(ours.handed_out), total(other.handed_out)),
            ("working, held back", total(ours.held_back), total(other.held_back)),
        ):
            if mine >= theirs and (mine or theirs):
                words.append(f"{figure}: {mine:,.1f} h, {title} {theirs:,.1f} h")
    if changed := sum(ours.changed.values()):
        words.append(f"{changed} verdicts changed by a restart")
    return words


def total(hours: Mapping[object, float] | Mapping[str, float] | Mapping[tuple[str, str], float]) -> float:
    """Return the sum of all hours."""
    return sum(hours.values())


def render(worlds: Sequence[World]) -> str:
    """Return the tables of all worlds together, the remaining hours of our policy, and the aims that are met."""
    tallies = together(worlds)
    days = tallies[OURS].hours / 24
    seeds = ", ".join(str(world.seed) for world in worlds)
    return "\n\n".join(
        (
            f"{days:,.0f} GPU-days under each policy, the same faults and jobs for all; seeds {seeds}",
            _policies(tallies),
            "What remains of ours: hours that a broken GPU was handed out\n" + _handed_out(tallies),
            "What remains of ours: hours that a working GPU was held back\n" + _held_back(tallies[OURS]),
            _restarts(tallies[OURS]),
            _aims(worlds, tallies),
            "Sources\n" + "\n".join(f"  {name}: {words}" for name, words in SOURCES.items()),
        )
    )


def _policies(tallies: Mapping[str, Tally]) -> str:
    head = [
        "",
        "broken, handed out",
        "pods on them",
        "working, held back",
        "pods turned away",
        "resets",
        "reboots",
        "replaced",
        "vouched or restarted",
        "GPUs restarted",
        "verdicts changed",
    ]
    lines = [head]
    for name, title in POLICIES.items():
        tally = tallies[name]
        lines.append(
            [
                title,
                f"{total(tally.handed_out):,.0f} h",
                f"{tally.lost:,}",
                f"{total(tally.held_back):,.0f} h",
                f"{tally.turned_away:,.0f}",
                *(f"{tally.steps.get(step, 0):,}" for step in ("reset", "reboot", "replace", "vouch")),
                f"{tally.restarts:,}",
                f"{sum(tally.changed.values()):,}",
            ]
        )
    return aligned(lines, left={0})


def _handed_out(tallies: Mapping[str, Tally]) -> str:
    ours = tallies[OURS]
    lines = [["incident", "of them all", "handed out", *POLICIES]]
    kinds = sorted(ours.incidents, key=lambda kind: -ours.handed_out.get(kind, 0.0))
    for kind in kinds:
        hours = [tallies[name].handed_out.get(kind, 0.0) for name in POLICIES]
        if any(hour >= SHOWN for hour in hours):
            each = (f"{hour:,.1f} h" for hour in hours)
            lines.append([kind, f"{ours.incidents[kind]:,}", f"{ours.handed.get(kind, 0):,}", *each])
    return aligned(lines, left={0})


def _held_back(ours: Tally) -> str:
    lines = [["signal", "what had been the matter", "times", "hours"]]
    few = [0, 0.0]
    for (signal, kind), hours in sorted(ours.held_back.items(), key=lambda item: -item[1]):
        if hours >= SHOWN:
            lines.append([signal, kind, f"{ours.held[signal, kind]:,}", f"{hours:,.1f} h"])
        else:
            few = [few[0] + ours.held[signal, kind], few[1] + hours]
    if few[0]:
        lines.append(["others", "", f"{few[0]:,.0f}", f"{few[1]:,.1f} h"])
    return aligned(lines, left={0, 1})


def _restarts(ours: Tally) -> str:
    words = f"Restarts of ours: {ours.restarts:,} GPUs went through one, {ours.standing:,} with something against them"
    words += f"; {sum(ours.changed.values()):,} verdicts changed"
    for what, times in sorted(ours.changed.items()):
        words += f"\n  {what}: {times}"
    words += f"\nWorse for some looks than without the restart, and the same in the end: {ours.longer:,}"
    return f"{words}\nHeld back until a first good look alone: {ours.first_look:,.1f} h"


def _aims(worlds: Sequence[World], tallies: Mapping[str, Tally]) -> str:
    wrong = missed(tallies)
    alone = sum(not missed(world.tallies) for world in worlds)
    words = f"Aims {'NOT met: ' + '; '.join(wrong) if wrong else 'met'}"
    return f"{words}. Met with {alone} of {len(worlds)} seeds alone"
