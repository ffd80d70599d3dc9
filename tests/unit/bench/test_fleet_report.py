"""The report on the simulated fleet: sums, aims, and the output of the command."""

import json

import pytest

from bench.fleet.__main__ import main
from bench.fleet.policies import POLICIES
from bench.fleet.rates import ASSUMED, FAULTY, LINKS, SOURCES
from bench.fleet.report import World, missed, render, together
from bench.fleet.sensitivity import VARIED, line, not_met
from bench.fleet.tally import Tally


def tally(out=0.0, back=0.0, changed=0):
    return Tally(
        hours=240.0,
        broken=out,
        handed_out={"wedged": out} if out else {},
        held_back={("xid 74", "nvlink-transient"): back} if back else {},
        handed={"wedged": 1} if out else {},
        held={("xid 74", "nvlink-transient"): 2} if back else {},
        incidents={"wedged": 3},
        changed={"FATAL to OK: xid 74": changed} if changed else {},
    )


def tallies(ours, nvidia, google, configured=None):
    return dict(zip(POLICIES, (ours, nvidia, google, configured or tally(9, 9)), strict=True))


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (tally(1, 1), []),
        (tally(0, 0), []),
        (tally(2, 1), ["broken, handed out: 2.0 h, NVIDIA v0.20.0 2.0 h"]),
        (tally(1, 3), ["working, held back: 3.0 h, Google, Xid 48 2.0 h"]),
        (tally(1, 1, changed=2), ["2 verdicts changed by a restart"]),
    ],
)
def test_the_aims_are_to_be_below_all_others_and_to_change_nothing_by_restarts(ours, words):
    assert missed(tallies(ours, tally(2, 5), tally(9, 2))) == words


def test_the_worlds_are_added_up_and_each_is_judged_alone():
    good, bad = tallies(tally(1, 1), tally(2, 5), tally(9, 2)), tallies(tally(4, 0), tally(3, 5), tally(9, 2))
    worlds = [World(1, good), World(2, bad)]
    assert together(worlds)["ours"].handed_out == {"wedged": 5.0}
    text = render(worlds)
    assert text.startswith("20 GPU-days under each policy")
    assert "Aims NOT met: broken, handed out: 5.0 h, NVIDIA v0.20.0 5.0 h. Met with 1 of 2 seeds alone" in text
    assert [line.split() for line in text.splitlines() if line.startswith("wedged")] == [
        ["wedged", "6", "2", "5.0", "h", "5.0", "h", "18.0", "h", "18.0", "h"]
    ]
    held = [line.split() for line in text.splitlines() if line.startswith("xid 74")]
    assert held == [["xid", "74", "nvlink-transient", "2", "1.0", "h"]]
    assert all(f"  {name}: {words}" in text for name, words in SOURCES.items())


def test_each_variation_changes_something_and_leaves_shares_that_add_up():
    assert VARIED[0][1] == ASSUMED
    assert all(assumed != ASSUMED for _, assumed in VARIED[1:])
    assert len({words for words, _ in VARIED}) == len(VARIED)
    for _, assumed in VARIED:
        assert set(assumed.faulty) == set(FAULTY)
        assert set(assumed.links) == set(LINKS)
        assert sum(assumed.faulty.values()) == pytest.approx(1)
        assert sum(assumed.links.values()) == pytest.approx(1)


def test_a_variation_says_which_aims_do_not_hold_but_for_what_no_policy_sees():
    assert not_met(tallies(tally(1, 1), tally(2, 5), tally(9, 2))) == []
    assert not_met(tallies(tally(1, 2, 3), tally(1, 5), tally(9, 2))) == ["out nvidia", "back google", "3 changed"]
    silent = tally(1, 1)
    silent.handed_out["silent-corruption"] = 1000.0
    assert not_met(tallies(silent, tally(2, 5), tally(9, 2))) == []
    assert line("words", tallies(silent, tally(2, 5), tally(9, 2))).split() == ["words", *"11259299-"]


def test_the_command_prints_the_same_for_the_same_seed_and_writes_every_figure(tmp_path, capsys):
    arguments = ["--gpu-days", "3000", "--seeds", "2", "--json", str(tmp_path / "fleet.json")]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    assert "3,000 GPU-days under each policy, the same faults and jobs for all; seeds 1, 2" in first
    written = json.loads((tmp_path / "fleet.json").read_text())
    assert set(written["policies"]) == set(POLICIES)
    assert written["policies"]["ours"]["hours"] == pytest.approx(72_000)
    assert set(written["seeds"]) == {"1", "2"}


def test_the_command_varies_what_is_assumed(monkeypatch, capsys):
    monkeypatch.setattr("bench.fleet.__main__.VARIED", VARIED[:2])
    assert main(["--sensitivity", "--gpu-days", "2000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2,000 GPU-days under each policy for each line, seed 1")
    rows = [row for row in out.splitlines() if row.startswith(tuple(words for words, _ in VARIED))]
    assert [row.split()[:2] for row in rows] == [["as", "assumed"], ["links", "90/7.5/2.5"]]
