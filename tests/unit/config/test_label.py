import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.config.label import FALLBACKS, NO_FILE, Choice, choose

FILES = frozenset({"a100", "default", "h100"})


@pytest.mark.parametrize(
    ("label", "present", "default", "fallbacks", "file"),
    [
        ("h100", FILES, "a100", ("named",), "h100"),
        ("", FILES, "a100", ("named",), "a100"),
        ("", FILES, "", ("named", "single"), "default"),
        ("", {"a100"}, "", ("named", "single"), "a100"),
        ("", {"a100", "h100"}, "", ("named", "single", "empty"), NO_FILE),
        ("", {"default", "h100"}, "", ("single", "named"), "default"),
        ("", {"default"}, "", ("empty", "named"), NO_FILE),
        ("", frozenset(), "", ("named", "single", "empty"), NO_FILE),
    ],
)
def test_the_label_then_the_default_then_the_fallbacks_in_order(label, present, default, fallbacks, file):
    assert choose(label, present, default, fallbacks) == Choice(file)


def test_an_unknown_label_keeps_what_was_in_force():
    choice = choose("b200", FILES, "default", ("named",), Choice("h100"))
    assert choice == Choice(
        "h100",
        "specified config b200 (by the node's label) does not exist: there are a100, default, h100; config h100 stays in force",
    )


def test_no_file_can_be_what_stays_in_force():
    choice = choose("b200", FILES, "", ("empty",), Choice(NO_FILE))
    assert choice.file == NO_FILE
    assert choice.complaint.endswith("no config file stays in force")


def test_an_unknown_default_keeps_what_was_in_force():
    choice = choose("", FILES, "b200", ("named",), Choice("h100"))
    assert choice.file == "h100"
    assert "specified config b200 (by the default) does not exist" in choice.complaint


@pytest.mark.parametrize(
    ("default", "fallbacks", "file", "instead"),
    [
        ("a100", ("named",), "a100", "the default, a100, is used until it does"),
        ("", ("named",), "default", "config default is used until it does"),
        ("gone", ("named",), "default", "config default is used until it does"),
        ("", ("empty",), NO_FILE, "no config file is used until it does"),
        ("", (), NO_FILE, "flags and environment alone are used"),
    ],
)
def test_at_the_start_an_unknown_label_is_passed_over(default, fallbacks, file, instead):
    choice = choose("b200", FILES, default, fallbacks)
    assert choice.file == file
    assert "specified config b200" in choice.complaint
    assert choice.complaint.endswith(instead)


def test_where_nothing_can_be_chosen_that_is_said():
    choice = choose("", {"a100", "h100"}, "", ("named", "single"))
    assert choice.file == NO_FILE
    assert choice.complaint.startswith("no config was set, no default was provided, and all fallbacks failed")
    assert choose("", {"a100", "h100"}, "", (), Choice("b200")).file == "b200"


@pytest.mark.parametrize("fallbacks", [(), ("named", "single")])
def test_where_there_are_no_files_that_is_said(fallbacks):
    assert choose("", frozenset(), "", fallbacks).complaint.startswith("no configuration files are available")
    assert (
        "no configuration files are available" in choose("h100", frozenset(), "", fallbacks, Choice("h100")).complaint
    )


NAMES = st.sampled_from(["a100", "default", "h100", "gone"])


@given(
    label=st.just("") | NAMES,
    present=st.frozensets(NAMES),
    default=st.just("") | NAMES,
    fallbacks=st.lists(st.sampled_from(sorted(FALLBACKS)), unique=True),
    in_force=st.none() | st.builds(Choice, st.just(NO_FILE) | NAMES),
)
def test_a_choice_is_there_or_was_in_force(label, present, default, fallbacks, in_force):
    choice = choose(label, present, default, fallbacks, in_force)
    assert choice.file in present | {NO_FILE} | ({in_force.file} if in_force else set())
    if label in present:
        assert choice == Choice(label)
    if label and label not in present:
        assert label in choice.complaint
