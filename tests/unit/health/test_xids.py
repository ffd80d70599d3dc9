import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.health.xids import APPLICATION_XIDS, XidList, XidPolicy, describe, parse_xid_list

NVIDIA_IGNORES = {13, 31, 43, 45, 68, 109}


def policy(disabled: str = "", enabled: str = "") -> XidPolicy:
    return XidPolicy(parse_xid_list(disabled), parse_xid_list(enabled))


@pytest.mark.parametrize("xid", sorted(NVIDIA_IGNORES))
def test_xids_that_nvidias_plugin_ignores_are_no_fault(xid):
    assert not XidPolicy().fatal(xid)


def test_every_other_xid_is_a_fault():
    assert {xid for xid in range(1000) if not XidPolicy().fatal(xid)} == NVIDIA_IGNORES == APPLICATION_XIDS


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", XidList()),
        ("13", XidList(numbers=frozenset({13}))),
        ("13,31", XidList(numbers=frozenset({13, 31}))),
        (" 13 , 31 ,, ", XidList(numbers=frozenset({13, 31}))),
        ("all", XidList(every=True)),
        (" ALL ", XidList(every=True)),
        ("xids", XidList(xids=True)),
        ("Xids,79", XidList(xids=True, numbers=frozenset({79}))),
        ("all,xids,48", XidList(every=True, xids=True, numbers=frozenset({48}))),
        ("007", XidList(numbers=frozenset({7}))),
        ("x13", XidList(malformed=("x13",))),
        ("13,banana,31", XidList(numbers=frozenset({13, 31}), malformed=("banana",))),
        ("-1,+2,3.0,0x4", XidList(malformed=("-1", "+2", "3.0", "0x4"))),
        ("1 3", XidList(malformed=("1 3",))),
        ("allx", XidList(malformed=("allx",))),
        ("²,٣", XidList(malformed=("²", "٣"))),
        ("9" * 5000, XidList(malformed=("9" * 5000,))),
    ],
)
def test_what_operators_write(text, read):
    assert parse_xid_list(text) == read


@given(st.text(max_size=40) | st.lists(st.sampled_from(["all", "XIDS", "79", " ", "x", "13"])).map(",".join))
@settings(max_examples=80, deadline=None)
def test_no_text_is_too_odd_to_read(text):
    read = parse_xid_list(text)
    words = [item.strip().lower() for item in text.split(",") if item.strip()]
    assert read.every is ("all" in words)
    assert read.xids is ("xids" in words)
    assert set(read.malformed) <= set(words)
    assert len(read.malformed) + sum(w in {"all", "xids"} or (w.isascii() and w.isdigit()) for w in words) == len(words)


@pytest.mark.parametrize(
    ("disabled", "enabled", "fatal", "harmless"),
    [
        ("", "", {48, 79, 94}, {13, 31}),
        ("79", "", {48, 94}, {13, 31, 79}),
        ("", "13", {13, 48, 79}, {31}),
        ("all", "", set(), {13, 48, 79, 94}),
        ("xids", "", set(), {13, 48, 79, 94}),
        ("all", "79", {79}, {13, 48, 94}),
        ("xids", "79", {79}, {13, 48, 94}),
        ("all", "13", {13}, {31, 48, 79}),
        ("", "all", {13, 31, 48, 79}, set()),
        ("", "xids", {13, 31, 48, 79}, set()),
        ("13", "all", {31, 48, 79}, {13}),
        ("all", "all", {13, 48, 79}, set()),
        ("xids", "all", {13, 48, 79}, set()),
        ("all,48", "all", {13, 79}, {48}),
        ("79", "79", {48, 79}, {13}),
        ("all,79", "79", {79}, {13, 48}),
        ("banana", "apple", {48, 79}, {13}),
    ],
)
def test_the_operators_lists_over_the_built_in_one(disabled, enabled, fatal, harmless):
    asked = policy(disabled, enabled)
    assert {xid for xid in fatal | harmless if asked.fatal(xid)} == fatal


@pytest.mark.parametrize(
    ("disabled", "enabled", "watched"),
    [
        ("", "", True),
        ("xids", "", True),
        ("79", "", True),
        ("all", "", False),
        ("all", "79", False),
        ("all", "all", True),
        ("", "all", True),
    ],
)
def test_heat_is_watched_unless_every_health_check_is_disabled(disabled, enabled, watched):
    assert policy(disabled, enabled).watch_temperature is watched


def test_an_xid_is_described_in_words_where_there_are_some():
    assert describe(79) == "Xid 79 (GPU has fallen off the bus)"
    assert describe(9999) == "Xid 9999"
