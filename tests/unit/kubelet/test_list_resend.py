"""When a list is sent again although nothing in it has changed."""

from gpu_plugin.kubelet.holding import RESEND_INTERVAL, UNANSWERED, ListResend

ONE, OTHER = {("r/mig", "MIG-1")}, {("r/mig", "MIG-2")}


def test_what_the_checkpoint_keeps_twice_in_a_row_has_a_list_sent_again_and_not_at_every_question():
    again = ListResend()
    assert again.due(ONE, ["r/gpu", "r/mig"], 0.0) == "", "a list that is on its way may do"
    assert again.due(ONE, ["r/mig", "r/gpu"], 2.0) == "r/gpu"
    assert [again.due(ONE, ["r/gpu"], 2.0 + passed) for passed in (2.0, RESEND_INTERVAL - 0.1, RESEND_INTERVAL)] == [
        "",
        "",
        "r/gpu",
    ]


def test_what_no_earlier_list_does_for_has_one_sent_at_once_and_no_more_often():
    again = ListResend()
    assert again.due(ONE | OTHER, ["r/gpu"], 0.0, ready=OTHER) == "r/gpu"
    assert [again.due(ONE, ["r/gpu"], passed, ready=ONE) for passed in (RESEND_INTERVAL - 0.1, RESEND_INTERVAL)] == [
        "",
        "r/gpu",
    ]
    assert ListResend().due(ONE, ["r/gpu"], 0.0, ready=OTHER) == "", "it is not kept"


def test_what_is_kept_no_more_and_what_is_kept_anew_ask_for_none():
    again = ListResend()
    for now, kept in enumerate([ONE, OTHER, set(), ONE, set()]):
        assert again.due(kept, ["r/gpu"], float(now)) == ""


def test_where_pod_resources_is_silent_it_is_done_a_few_times_and_no_more():
    again = ListResend()
    times = [now * RESEND_INTERVAL for now in range(20)]
    assert sum(bool(again.due(ONE, ["r/a"], now, answered=False)) for now in times) == UNANSWERED
    assert again.due(ONE, ["r/a"], 1000.0) == "r/a", "it answers"
    assert again.due(ONE, ["r/a"], 1010.0) == "r/a"


def test_without_a_list_there_is_none_to_send():
    again = ListResend()
    assert [again.due(ONE, [], now) for now in (0.0, 1.0)] == ["", ""]
