import pytest

from gpu_plugin.config.words import counted, shortened


def test_things_are_counted_in_english():
    assert [counted(count, "free replica") for count in (0, 1, 2)] == [
        "0 free replicas",
        "1 free replica",
        "2 free replicas",
    ]


@pytest.mark.parametrize(("text", "shown"), [("", ""), ("12345678", "12345678"), ("123456789", "12345...")])
def test_a_text_is_cut_where_it_is_longer_than_it_may_be(text, shown):
    assert shortened(text, 8) == shown
