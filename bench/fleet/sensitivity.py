"""Variations of one assumption at a time, and the aims that are met then. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from bench.fleet.policies import POLICIES
from bench.fleet.rates import ASSUMED, FAULTY, LINKS, Assumed
from bench.fleet.report import OURS, total
from bench.fleet.tally import Tally

Variation = tuple[str, Assumed]

_WIDE = 34


def _links(passing: float, down: float, failing: float) -> Assumed:
    return replace(ASSUMED, links=dict(zip(LINKS, (passing, down, failing), strict=True)))


def _faulty(**shares: float) -> Assumed:
    """Set these shares of the faulty GPUs, by names with underscores. All other shares change in proportion."""
    given = {name.replace("_", "-"): share for name, share in shares.items()}
    rest = sum(share for name, share in FAULTY.items() if name not in given)
    left = 1 - sum(given.values())
    return replace(ASSUMED, faulty={name: given.get(name, share * left / rest) for name, share in FAULTY.items()})


def _often(by: float, *names: str) -> Assumed:
    return replace(ASSUMED, often=dict.fromkeys(names, by))


def _kind(name: str, **changes: object) -> Assumed:
    return replace(ASSUMED, kinds={name: changes})


VARIED: tuple[Variation, ...] = (
    ("as assumed", ASSUMED),
    ("links 90/7.5/2.5 % (pass/down/fail)", _links(0.9, 0.075, 0.025)),
    ("links 60/30/10 %", _links(0.6, 0.3, 0.1)),
    ("links 65/15/20 %", _links(0.65, 0.15, 0.2)),
    ("27 % of passing link errors break", _kind("nvlink-transient", broken=0.27)),
    ("54 % of passing link errors break", _kind("nvlink-transient", broken=0.54)),
    ("failing links recur every 5 min", _kind("nvlink-flapping", repeats=300.0)),
    ("failing links recur every 20 min", _kind("nvlink-flapping", repeats=1200.0)),
    ("failed recoveries are counted", replace(ASSUMED, counts_recoveries=True)),
    ("the same, links 65/15/20 %", replace(_links(0.65, 0.15, 0.2), counts_recoveries=True)),
    ("wedged 5 % of faulty GPUs, not 10", _faulty(wedged=0.05)),
    ("wedged 20 %", _faulty(wedged=0.2)),
    ("wedged 30 %, engine-hang 5 %", _faulty(wedged=0.3, engine_hang=0.05)),
    ("engine-hang 12.5 %, not 25", _faulty(engine_hang=0.125)),
    ("engine-hang 50 %", _faulty(engine_hang=0.5)),
    ("pcie-fatal 2.5 %, not 5", _faulty(pcie_fatal=0.025)),
    ("pcie-fatal 10 %", _faulty(pcie_fatal=0.1)),
    ("5 GSP errors an incident, not 10", replace(ASSUMED, gsp_errors=5.0)),
    ("20 GSP errors an incident", replace(ASSUMED, gsp_errors=20.0)),
    ("half of the harmless Xids 122 harm", _kind("pmu-spi", broken=0.925)),
    ("twice as many are harmless", _kind("pmu-spi", broken=0.7)),
    ("1 % of contained ECC errors break", _kind("ecc-contained", broken=0.01)),
    ("5 % of contained ECC errors break", _kind("ecc-contained", broken=0.05)),
    ("recovery action at once, not after 5 s", replace(ASSUMED, action_seconds=0.0)),
    ("recovery action after 1 min", replace(ASSUMED, action_seconds=60.0)),
    ("recovery action after 10 min", replace(ASSUMED, action_seconds=600.0)),
    ("heat breaks at the shutdown, not 1 °C", replace(ASSUMED, heat_below=0.0)),
    ("heat breaks 3 °C below the shutdown", replace(ASSUMED, heat_below=3.0)),
    ("hot readings do not vary, not by 1 °C", replace(ASSUMED, heat_spread=0.0)),
    ("hot readings vary by 3 °C", replace(ASSUMED, heat_spread=3.0)),
    ("driver slow half as often", _often(0.5, "nvml-glitch")),
    ("driver slow twice as often", _often(2.0, "nvml-glitch")),
    ("energy stays on 25 % of nodes, not 50", replace(ASSUMED, energy_stays=0.25)),
    ("energy stays on all nodes", replace(ASSUMED, energy_stays=1.0)),
    ("no persistence on 20 %, not 10", replace(ASSUMED, without_persistence=0.2)),
    ("operators come in 2 h, not 4", replace(ASSUMED, operator_hours=2.0)),
    ("operators come in 8 h", replace(ASSUMED, operator_hours=8.0)),
    ("complaints take 6 h, not 12", replace(ASSUMED, complaint_hours=6.0)),
    ("complaints take 24 h", replace(ASSUMED, complaint_hours=24.0)),
    ("tests take 8 min, not 15", replace(ASSUMED, test_seconds=450.0)),
    ("tests take 30 min", replace(ASSUMED, test_seconds=1800.0)),
    ("other Xids of applications 1 %, not 2", replace(ASSUMED, others=0.01)),
    ("other Xids of applications 4 %", replace(ASSUMED, others=0.04)),
    ("restarts every 15 days, not 30", replace(ASSUMED, restart_days=15.0)),
    ("restarts every 60 days", replace(ASSUMED, restart_days=60.0)),
)
"""A description of each variation, and its assumptions."""

FLIPS = """Hours in which broken GPUs were handed out (out) and working GPUs were held back (back). Silent wrong results are left
out, since they are the same under every policy. The last column names the policies with fewer hours than this project."""


def headed() -> str:
    """Return the head of the table."""
    names = "".join(f"{name:>18}" for name in POLICIES)
    return (
        f"{'':<{_WIDE + 4}}{names}\n{'assumed':<{_WIDE + 4}}" + f"{'out':>10}{'back':>8}" * len(POLICIES) + "  not met"
    )


def line(words: str, tallies: Mapping[str, Tally]) -> str:
    """Return the row of one variation."""
    figures = "".join(f"{_reported(tally):>10,.0f}{total(tally.held_back):>8,.0f}" for tally in tallies.values())
    return f"{words:<{_WIDE + 4}}{figures}  {', '.join(not_met(tallies)) or '-'}"


def not_met(tallies: Mapping[str, Tally]) -> list[str]:
    """Return short names of the aims that are not met."""
    ours, found = tallies[OURS], []
    for name, tally in tallies.items():
        if name != OURS:
            found += [f"out {name}"] * (_reported(ours) >= _reported(tally))
            found += [f"back {name}"] * (total(ours.held_back) >= total(tally.held_back))
    return found + [f"{sum(ours.changed.values())} changed"] * bool(ours.changed)


def _reported(tally: Tally) -> float:
    """Return the hours handed out, without incidents that no driver reports."""
    return total(tally.handed_out) - tally.handed_out.get("silent-corruption", 0.0)
