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


UNTOLD = "the Kubernetes API answered 403"
THERE = "there are a100, default, h100"
BY_LABEL = "specified config b200 (by the node's label) does not exist"


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ({"label": "b200", "default": "default"}, Choice(None, f"{BY_LABEL}: {THERE}", "b200")),
        ({"label": "b200", "last": "h100"}, Choice("h100", f"{BY_LABEL}: {THERE}; config h100 stays in force", "b200")),
        (
            {"label": "b200", "fallbacks": ("empty",), "last": NO_FILE},
            Choice(NO_FILE, f"{BY_LABEL}: {THERE}; no config file stays in force", "b200"),
        ),
        (
            {"default": "b200", "last": "h100"},
            Choice(
                "h100",
                f"specified config b200 (by the default) does not exist: {THERE}; config h100 stays in force",
                "b200",
            ),
        ),
        (
            {"label": "b200", "present": frozenset()},
            Choice(None, f"{BY_LABEL}: no configuration files are available", "b200"),
        ),
        ({"present": frozenset(), "fallbacks": ("named",)}, Choice(None, "no configuration files are available")),
        (
            {"present": frozenset({"a100", "h100"}), "fallbacks": ("named", "single")},
            Choice(None, "no config was set, no default was provided, and all fallbacks failed: there are a100, h100"),
        ),
        ({"fallbacks": ("empty",), "last": NO_FILE}, Choice(NO_FILE)),
        (
            {"fallbacks": ("single", "empty"), "last": "h100"},
            Choice(
                "h100",
                "the label names no config, and the fallback empty does not replace one that was chosen before: "
                f"{THERE}; config h100 stays in force",
            ),
        ),
        ({"label_unknown": UNTOLD, "last": "h100"}, Choice("h100", f"{UNTOLD}; config h100 stays in force")),
        ({"label_unknown": UNTOLD, "last": NO_FILE}, Choice(NO_FILE, f"{UNTOLD}; no config file stays in force")),
        (
            {"label_unknown": UNTOLD, "last": "b200"},
            Choice(None, f"{UNTOLD}; config b200, the last one chosen, does not exist: {THERE}"),
        ),
        ({"label_unknown": UNTOLD, "default": "default", "fallbacks": ("named", "empty")}, Choice(None, UNTOLD)),
        (
            {"label": "h100", "present": frozenset(), "fallbacks": ("empty",), "files_unknown": "unreadable"},
            Choice(None, "unreadable", "h100"),
        ),
        (
            {"label_unknown": UNTOLD, "files_unknown": "unreadable", "default": "a100", "last": "h100"},
            Choice("h100", f"{UNTOLD}; unreadable; config h100 stays in force", "a100"),
        ),
    ],
)
def test_without_the_file_that_is_asked_for_the_last_choice_is_kept(asked, choice):
    assert choose(**{"label": "", "present": FILES, **asked}) == choice


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
