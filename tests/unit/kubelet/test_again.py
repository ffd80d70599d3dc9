"""When a list is sent again although nothing in it has changed."""

from gpu_plugin.kubelet.again import PAUSE, Again

ONE, OTHER = {("r/mig", "MIG-1")}, {("r/mig", "MIG-2")}


def test_what_the_checkpoint_keeps_twice_in_a_row_has_a_list_sent_again_and_not_at_every_question():
    again = Again()
    assert again.due(ONE, ["r/gpu", "r/mig"], 0.0) == "", "a list that is on its way may do"
    assert again.due(ONE, ["r/mig", "r/gpu"], 2.0) == "r/gpu"
    assert [again.due(ONE, ["r/gpu"], 2.0 + passed) for passed in (2.0, PAUSE - 0.1, PAUSE)] == ["", "", "r/gpu"]


def test_what_is_kept_no_more_and_what_is_kept_anew_ask_for_none():
    again = Again()
    for now, kept in enumerate([ONE, OTHER, set(), ONE, set()]):
        assert again.due(kept, ["r/gpu"], float(now)) == ""


def test_without_a_list_there_is_none_to_send():
    again = Again()
    assert [again.due(ONE, [], now) for now in (0.0, 1.0)] == ["", ""]
