"""The rules for daemons that another program runs."""

import pytest
from msgspec.structs import replace

from gpu_plugin.config.sharing import MpsLimits
from gpu_plugin.mps.foreign import (
    CONFIRM,
    LOOK_AGAIN,
    SET_UP,
    Answer,
    Signs,
    answer_to_use,
    doubt,
    due,
    settled,
    why_down,
)

UP = Signs(control=(1, 2, 3), started=(1, 4, 5), locked=True)
ENDED = replace(UP, locked=False)
NEW = replace(UP, control=(1, 9, 9))
EQUAL = MpsLimits()
GOOD = Answer(UP, 100.0, threads=25.0)
GONE = Answer(ENDED, 100.0, trouble="its control answers with status 1")
SILENT = Answer(UP, 130.0, trouble="its control has not answered")


def test_a_limit_that_any_client_can_change_takes_no_device_from_pods_and_is_doubted_with_both_numbers():
    assert doubt(GOOD, 4, EQUAL) == ""
    assert doubt(replace(GOOD, threads=33.0), 3, EQUAL) == ""
    assert doubt(replace(GOOD, threads=12.5), 4, MpsLimits(active_thread_percentage=12.5)) == ""
    said = doubt(replace(GOOD, threads=100.0), 4, EQUAL)
    assert "gives each client 100 % of a GPU's threads, not 25 %" in said
    assert "limits.activeThreadPercentage to 100" in said


UNSTARTED = replace(UP, started=())
RESTART, PROGRAM = "restart the program", "--driver-root-ctr-path"


def unable(signs):
    return Answer(signs, 100.0, unable="no nvidia-cuda-mps-control at $PATH")


@pytest.mark.parametrize(
    ("signs", "answer", "reason", "remedy"),
    [
        (UP, None, "the daemon of another program has not answered yet", RESTART),
        (NEW, GOOD, "the daemon of another program has not answered yet", RESTART),
        (ENDED, GOOD, "the daemon of another program has ended", RESTART),
        (ENDED, GONE, "no daemon of another program can be used: its control answers with status 1", RESTART),
        (UNSTARTED, unable(UNSTARTED), "(no nvidia-cuda-mps-control at $PATH), and it has no file .started", PROGRAM),
        (ENDED, unable(ENDED), "and no process holds the lock of a control daemon", RESTART),
    ],
)
def test_each_reason_has_a_remedy_that_an_operator_can_apply(signs, answer, reason, remedy):
    found, to_do = why_down(signs, answer).split("; to do: ")
    assert found.startswith("its MPS daemon is down: gpu-plugin mps does not run on this node, and ")
    assert reason in found
    assert remedy in to_do
    assert ("wait some seconds" in to_do) is ("yet" in reason)
    assert "the log of" not in to_do, "gpu-plugin mps does not run"


@pytest.mark.parametrize(
    ("signs", "answer"),
    [
        (UP, GOOD),
        (UP, replace(GOOD, threads=100.0)),
        (ENDED, replace(GOOD, signs=ENDED)),  # a daemon without a lock counts by its answers alone
        (UP, unable(UP)),  # it has a lock, and .started was made after its limits were set
    ],
)
def test_a_daemon_is_up(signs, answer):
    assert why_down(signs, answer) == ""


def test_a_daemon_is_left_alone_until_it_has_been_told_its_limits():
    made = 1_000.0
    fresh = Signs(control=(1, 2, int(made * 1e9)), locked=True)
    assert not settled(fresh, made + SET_UP - 0.1)
    assert settled(fresh, made + SET_UP)
    assert settled(fresh, made - 60)  # the clock was set back
    assert settled(replace(fresh, started=(1, 4, 5)), made + 0.1)


@pytest.mark.parametrize(
    ("signs", "answer", "seconds"),
    [
        (UP, GOOD, CONFIRM),
        (UP, replace(GOOD, misses=1), LOOK_AGAIN),
        (UP, replace(GOOD, threads=100.0), CONFIRM),
        (ENDED, replace(GOOD, signs=ENDED), LOOK_AGAIN),
        (ENDED, GONE, LOOK_AGAIN),
    ],
)
def test_it_is_asked_seldom_while_it_is_up_and_soon_otherwise(signs, answer, seconds):
    assert not due(signs, answer, 100.0 + seconds - 0.01)
    assert due(signs, answer, 100.0 + seconds)


@pytest.mark.parametrize("signs", [ENDED, NEW, replace(UP, started=()), replace(UP, started=(1, 4, 6))])
def test_it_is_asked_at_once_when_its_signs_change(signs):
    assert due(UP, None, 100.0)
    assert due(signs, GOOD, 100.0)


def test_one_unanswered_question_is_excused_to_a_daemon_that_lives_and_was_up():
    once = answer_to_use(SILENT, GOOD)
    assert why_down(UP, once) == ""
    assert "has not answered" in why_down(UP, answer_to_use(replace(SILENT, asked=133.0), once))
    assert answer_to_use(replace(GOOD, asked=133.0), once) == replace(GOOD, asked=133.0)
    unstarted = replace(UP, started=())
    # Otherwise each look would send a query.
    assert answer_to_use(replace(SILENT, signs=unstarted), GOOD).signs == unstarted


@pytest.mark.parametrize("last", [None, GONE, SILENT, replace(GOOD, signs=NEW)])
def test_no_other_is_excused(last):
    assert answer_to_use(SILENT, last) == SILENT


def test_a_daemon_that_is_gone_is_not_excused():
    assert answer_to_use(GONE, GOOD) == GONE
