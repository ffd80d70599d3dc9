import pytest

from gpu_plugin.config.schema_v1 import XID_CLASSES, XID_VERDICTS
from gpu_plugin.health.latch import Proof, Verdict
from gpu_plugin.health.policy import VERDICTS, XidList, XidPolicy, parse_xid_list
from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.health.xid_table import ROWS, XID_TABLE, XidRow

BEYOND = 9999

# The expected policy: Xids by verdict and by the proof that the fault is over.
POLICY: dict[tuple[Verdict, Proof], list[int]] = {
    (Verdict.APP, Proof.APPLICATION): [
        *(8, 11, 13, 25, 31, 32, 37, 38, 39, 40, 41, 43, 44, 45, 60, 66, 67, 68, 69, 70, 71, 72, 75, 76, 77, 80),
        *(82, 83, 84, 85, 86, 88, 89, 94, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 126, 127, 128, 129, 130),
        *(131, 132, 133, 134, 135, 138, 139, 141, 147, 148, 154, 159),
    ],
    (Verdict.OK, Proof.APPLICATION): [106, 107, 152, 153, 162, 163],
    (Verdict.DEGRADED, Proof.QUIET): [
        *(47, 65, 73, 92, 93, 108, 109, 121, 122, 124, 125, 137, 157, 160, 161, 164, 165, 166, 170),
    ],
    (Verdict.DEGRADED, Proof.RESET): [63, 74, 78, 144, 145, 146, 149],
    (Verdict.DEGRADED, Proof.RMA): [142],
    (Verdict.FATAL, Proof.RESET): [
        *(46, 48, 61, 62, 64, 95, 110, 119, 120, 123, 136, 140, 143, 150, 155, 156, 158, 168, 169, 171, 172),
    ],
    (Verdict.FATAL, Proof.REBOOT): [54, 79, 151, 167],
}


def policy(disabled: str = "", enabled: str = "", **more: object) -> XidPolicy:
    return XidPolicy(XID_TABLE, parse_xid_list(disabled), parse_xid_list(enabled), **more)  # type: ignore[arg-type]


# The table


def test_the_table_has_each_xid_once_with_its_verdict_and_recovery():
    found: dict[tuple[Verdict, Proof], list[int]] = {}
    for xid, row in sorted(XID_TABLE.items()):
        found.setdefault((row.verdict, row.recovery), []).append(xid)
    assert found == POLICY
    assert sorted(xid for row in ROWS for xid in row.codes) == sorted(XID_TABLE)


def test_each_rule_of_the_table_concerns_its_xids():
    def having(name: str) -> set[int]:
        return {xid for xid, row in XID_TABLE.items() if getattr(row, name)}

    assert having("within") == {32, 74, 80, 94}
    assert having("beside") == {45, 74}
    assert having("brings") == {48, 122}
    assert having("silent") == {154}
    assert having("firm") == {79}
    assert having("look") == {154}
    assert {79, 95, 119, 120, 62, 54, 143} <= having("whole_gpu")
    assert not having("whole_gpu") & {13, 31, 43, 46, 48, 94, 109}
    assert {13, 31, 43, 39, 135, 109} <= having("repeats")
    assert not having("repeats") & {32, 45, 80, 94, 37, 147}


def test_the_table_has_the_driver_branch_from_which_a_recovery_action_follows():
    """As NVIDIA's catalogue has it in the column "Xid 154 linkage"."""
    linked: dict[int, set[int]] = {}
    for xid, row in XID_TABLE.items():
        if row.linked is not None:
            linked.setdefault(row.linked, set()).add(xid)
    assert linked == {
        0: {158, 159},
        565: {48, 62, 63, 64, 74, 79, 94, 95, 110, 120, 136, *range(144, 151), 155, 156},
        570: {109},
        575: {143, 160, 161},
    }


def test_the_table_agrees_with_the_config_and_the_signals():
    assert {row.beside[0] for row in XID_TABLE.values() if row.beside} <= SIGNALS.keys()
    assert set(XID_VERDICTS) == VERDICTS.keys()
    assert {Proof(word) for word in XID_CLASSES} == {row.recovery for row in XID_TABLE.values()}
    for row in ROWS:
        assert row.name
        assert not (row.within and row.brings), row.name  # a latch supports only one rule
        assert not (row.repeats and row.verdict is Verdict.FATAL), row.name  # `repeats` is for errors of applications
        assert not row.within or 2 <= row.count <= 64, row.name


# The lists of the environment


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
def test_lists_of_xids_are_parsed(text, read):
    assert parse_xid_list(text) == read


@pytest.mark.parametrize(
    ("disabled", "enabled", "fatal", "harmless"),
    [
        ("", "", {48, 79, 95}, {13, 31, 94, 109, BEYOND}),
        ("79", "", {48, 95}, {13, 31, 79}),
        ("", "13", {13, 48, 79}, {31}),
        ("all", "", set(), {13, 48, 79, 94, BEYOND}),
        ("xids", "", set(), {13, 48, 79, 94, BEYOND}),
        ("all", "79", {79}, {13, 48, 94, BEYOND}),
        ("xids", "79", {79}, {13, 48, 94, BEYOND}),
        ("all", "13", {13}, {31, 48, 79}),
        ("all", "9999", {BEYOND}, {31, 48, 79}),
        ("", "all", {13, 31, 48, 79, BEYOND}, set()),
        ("", "xids", {13, 31, 48, 79, BEYOND}, set()),
        ("13", "all", {31, 48, 79}, {13}),
        ("all", "all", {13, 48, 79}, set()),
        ("xids", "all", {13, 48, 79}, set()),
        ("all,48", "all", {13, 79}, {48}),
        ("79", "79", {48, 79}, {13}),
        ("all,79", "79", {79}, {13, 48}),
        ("banana", "apple", {48, 79}, {13}),
    ],
)
def test_the_operators_lists_over_the_table(disabled, enabled, fatal, harmless):
    asked = policy(disabled, enabled)
    assert {xid for xid in fatal | harmless if asked.judge(xid).verdict is Verdict.FATAL} == fatal


@pytest.mark.parametrize("words", [("all", ""), ("xids", "")])
def test_disabled_xids_are_ignored(words):
    asked = policy(*words)
    assert {asked.judge(xid).verdict for xid in [*XID_TABLE, BEYOND]} == {Verdict.OK}


# Precedence of policies, the strongest last


LEVELS: dict[str, dict[str, object]] = {
    "table": {},
    "words": {"disabled": "all"},
    "class": {"classes": {Proof.RESET: Verdict.APP}},
    "number in the file": {"numbers": {48: Verdict.DEGRADED}},
    "number disabled": {"disabled": "48"},
    "number critical": {"critical": frozenset({48})},
}
MEANS = [Verdict.FATAL, Verdict.OK, Verdict.APP, Verdict.DEGRADED, Verdict.OK, Verdict.FATAL]


@pytest.mark.parametrize("upto", range(1, len(LEVELS) + 1))
def test_the_most_specific_setting_counts_and_the_environment_before_the_file(upto):
    asked: dict[str, object] = {}
    for level in list(LEVELS.values())[:upto]:
        for name, value in level.items():
            asked[name] = f"{asked[name]},{value}" if name == "disabled" and name in asked else value
    assert policy(**asked).judge(48).verdict is MEANS[upto - 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "xid", "verdict"),
    [
        ({"classes": {Proof.APPLICATION: Verdict.OK}}, 31, Verdict.OK),
        ({"classes": {Proof.APPLICATION: Verdict.OK}}, 48, Verdict.FATAL),
        ({"classes": {Proof.APPLICATION: Verdict.OK}, "numbers": {31: Verdict.FATAL}}, 31, Verdict.FATAL),
        ({"classes": {Proof.APPLICATION: Verdict.OK}, "enabled": "all"}, 31, Verdict.OK),
        ({"classes": {Proof.RESET: Verdict.DEGRADED}}, BEYOND, Verdict.DEGRADED),
        ({"classes": {Proof.RESET: Verdict.FATAL}}, BEYOND, Verdict.DEGRADED),
        ({"numbers": {94: Verdict.DEGRADED}, "disabled": "all"}, 94, Verdict.DEGRADED),
        ({"numbers": {94: Verdict.OK}, "enabled": "94"}, 94, Verdict.FATAL),
        ({"numbers": {94: Verdict.FATAL}, "disabled": "94"}, 94, Verdict.OK),
        ({"critical": frozenset({31, BEYOND})}, 31, Verdict.FATAL),
        ({"critical": frozenset({31, BEYOND})}, BEYOND, Verdict.FATAL),
        ({"critical": frozenset({31}), "disabled": "31"}, 31, Verdict.FATAL),
        ({"critical": frozenset({31}), "disabled": "all"}, 31, Verdict.FATAL),
        ({"critical": frozenset({31})}, 43, Verdict.APP),
    ],
)
def test_settings_by_class_and_number(asked, xid, verdict):
    judged = policy(**asked).judge(xid)
    assert judged.verdict is verdict
    assert judged.firm is (judged != policy().judge(xid))


def test_a_setting_for_an_xid_replaces_its_rules():
    assert policy(numbers={94: Verdict.APP}).judge(94).raised is Verdict.OK
    assert policy(numbers={74: Verdict.DEGRADED}).judge(74).beside is None
    assert not policy(numbers={31: Verdict.DEGRADED}).judge(31).repeats
    assert not policy(disabled="31").judge(31).repeats
    assert policy(numbers={31: Verdict.APP}).judge(31).repeats
    assert policy(numbers={79: Verdict.DEGRADED}).judge(79).whole_gpu


def test_without_a_table_every_xid_is_unknown():
    assert XidPolicy().judge(79) == policy().judge(BEYOND) == XidRow()
