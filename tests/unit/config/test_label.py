import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.config.label import NO_FILE, Choice, choose

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


def test_an_unknown_label_keeps_the_last_choice():
    choice = choose("b200", FILES, "default", ("named",), "h100")
    assert choice == Choice(
        "h100",
        "specified config b200 (by the node's label) does not exist: there are a100, default, h100; config h100 stays in force",
        "b200",
    )


def test_no_file_can_be_what_stays_in_force():
    choice = choose("b200", FILES, "", ("empty",), NO_FILE)
    assert choice.file == NO_FILE
    assert choice.complaint.endswith("no config file stays in force")


def test_an_unknown_default_keeps_the_last_choice():
    choice = choose("", FILES, "b200", ("named",), "h100")
    assert (choice.file, choice.asked) == ("h100", "b200")
    assert "specified config b200 (by the default) does not exist" in choice.complaint


@pytest.mark.parametrize(
    ("label", "present", "default", "fallbacks"),
    [
        ("b200", FILES, "a100", ("named",)),
        ("b200", FILES, "", ("named",)),
        ("b200", FILES, "", ("empty",)),
        ("", FILES, "b200", ("named", "empty")),
        ("b200", frozenset(), "", ("empty",)),
        ("", {"a100", "h100"}, "", ("named", "single")),
        ("", frozenset(), "", ("named", "single")),
    ],
)
def test_what_is_not_there_is_replaced_by_nothing_else(label, present, default, fallbacks):
    choice = choose(label, present, default, fallbacks)
    assert choice.file is None
    assert choice.complaint
    assert choose(label, present, default, fallbacks, "h100").file == "h100"


def test_an_unknown_name_is_said_with_what_there_is():
    said = "specified config b200 (by the node's label) does not exist: there are a100, default, h100"
    assert choose("b200", FILES).complaint == said
    assert choose("", {"a100", "h100"}).complaint.startswith(
        "no config was set, no default was provided, and all fallbacks failed"
    )
    assert "no configuration files are available" in choose("h100", frozenset()).complaint


UNTOLD = "the Kubernetes API answered 403"


@pytest.mark.parametrize("default", ["", "default"])
@pytest.mark.parametrize("present", [FILES, frozenset()])
def test_a_label_that_is_not_known_is_no_reason_for_a_default_or_a_fallback(default, present):
    assert choose("", present, default, ("named", "single", "empty"), None, UNTOLD) == Choice(None, UNTOLD)


@pytest.mark.parametrize(("last", "named"), [("h100", "config h100"), (NO_FILE, "no config file")])
def test_while_the_label_is_not_known_the_last_choice_is_kept(last, named):
    choice = choose("", FILES, "default", ("named",), last, UNTOLD)
    assert choice == Choice(last, f"{UNTOLD}; {named} stays in force")


def test_while_the_label_is_not_known_a_last_choice_that_is_gone_is_waited_for():
    choice = choose("", FILES, "default", ("named",), "b200", UNTOLD)
    assert choice.file is None
    assert (
        choice.complaint == f"{UNTOLD}; config b200, the last one chosen, does not exist: there are a100, default, h100"
    )


@pytest.mark.parametrize("present", [frozenset(), FILES])
def test_no_file_replaces_none_that_was_chosen_before(present):
    choice = choose("", present, "", ("single", "empty"), "h100")
    assert choice.file == "h100"
    assert "the fallback empty does not replace one that was chosen before" in choice.complaint
    assert choose("", present, "", ("single", "empty"), NO_FILE) == Choice(NO_FILE)


@pytest.mark.parametrize("last", [None, NO_FILE, "h100"])
@pytest.mark.parametrize("label", ["", "h100"])
def test_where_the_files_are_not_known_the_last_choice_is_kept(label, last):
    choice = choose(label, frozenset(), "", ("named", "single", "empty"), last, "", "it cannot be read")
    assert choice.file == last
    assert choice.complaint.startswith("it cannot be read")


NAMES = st.sampled_from(["a100", "default", "h100", "gone"])


@given(
    label=st.just("") | NAMES,
    present=st.frozensets(NAMES),
    default=st.just("") | NAMES,
    fallbacks=st.lists(st.sampled_from(["empty", "named", "single"]), unique=True),
    last=st.none() | st.just(NO_FILE) | NAMES,
    label_unknown=st.sampled_from(["", UNTOLD]),
)
def test_what_was_asked_for_is_used_or_what_was_chosen_last_and_nothing_else(
    label, present, default, fallbacks, last, label_unknown
):
    choice = choose(label, present, default, fallbacks, last, label_unknown)
    asked = "" if label_unknown else label or default
    if asked in present:
        assert choice == Choice(asked)
    elif asked or label_unknown:
        assert choice.file in {last, None}
        assert choice.complaint
    else:
        assert choice.file in present | {NO_FILE, last}
    assert choice.complaint or choice.file is not None
