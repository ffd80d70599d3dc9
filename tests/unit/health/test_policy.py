import pytest

from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.schema_v1 import SIGNAL_VERDICTS
from gpu_plugin.health import signals
from gpu_plugin.health.latch import NOTHING, Latch, LatchKey, Proof, Verdict
from gpu_plugin.health.policy import VERDICTS, HealthPolicy, XidPolicy, policy
from gpu_plugin.health.signals import standing
from gpu_plugin.health.xid_table import XID_TABLE

TABLE = XID_TABLE
OPEN = [verdict for verdict in Verdict if verdict is not Verdict.OK]


def asked(environ: dict[str, str] | None = None, **health: object) -> HealthPolicy:
    return policy(resolve({}, environ or {}, {"health": health}), TABLE)


def test_the_default_policy_is_the_table():
    plain = asked()
    assert plain == HealthPolicy(XidPolicy(TABLE))
    assert (plain.temperature_recovery, plain.flap_hold, plain.judging) == (300.0, 3600.0, True)
    assert plain.malformed == ()


def test_signals_that_can_be_judged_otherwise_are_all_that_are_not_essential_but_xids():
    judged = {name for name, about in HEALTH_SIGNALS.items() if about}
    assert judged == {name for name, signal in signals.SIGNALS.items() if not signal.essential} - {"xid"}
    assert set(SIGNAL_VERDICTS) < VERDICTS.keys()


def test_the_configuration_sets_times():
    file = {"flags": {"temperatureRecovery": "1m", "flapGuard": "0s"}}
    told = policy(resolve({}, {}, file), TABLE)
    assert (told.temperature_recovery, told.flap_hold) == (60.0, 0.0)


def test_the_file_sets_verdicts_of_xids_and_signals():
    told = asked(xid={"94": "degraded", "109": "ignore", "7777": "fatal"}, xidClass={"application": "ignore"})
    assert [told.xids.judge(xid).verdict for xid in (94, 109, 7777, 31, 48)] == [
        Verdict.DEGRADED,
        Verdict.OK,
        Verdict.FATAL,
        Verdict.OK,
        Verdict.FATAL,
    ]
    assert told.xids.classes == {Proof.APPLICATION: Verdict.OK}
    assert asked(signals={"nvlink": "fatal", "pcie-width": "ignore"}).signals == {
        "nvlink": Verdict.FATAL,
        "pcie-width": Verdict.OK,
    }


# Everything that DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS can say together


@pytest.mark.parametrize(
    ("disabled", "enabled", "xids", "judging"),
    [
        ("", "", {48: True, 79: True, 31: False}, True),
        ("all", "", {48: False, 79: False, 31: False}, False),
        ("xids", "", {48: False, 79: False, 31: False}, True),
        ("all", "79", {48: False, 79: True, 31: False}, False),
        ("xids", "79", {48: False, 79: True, 31: False}, True),
        ("all", "all", {48: True, 79: True, 31: True}, True),
        ("", "all", {48: True, 79: True, 31: True}, True),
        ("79", "", {48: True, 79: False, 31: False}, True),
        ("", "31", {48: True, 79: True, 31: True}, True),
        ("31", "31", {48: True, 79: True, 31: True}, True),
    ],
)
def test_everything_disabled_and_one_xid_enabled_leaves_that_one(disabled, enabled, xids, judging):
    told = asked({"DP_DISABLE_HEALTHCHECKS": disabled, "DP_ENABLE_HEALTHCHECKS": enabled})
    assert {xid: told.xids.judge(xid).verdict is Verdict.FATAL for xid in xids} == xids
    assert told.judging is judging
    heat = Latch(NOTHING, Verdict.FATAL, "hot")
    assert standing(LatchKey("temperature"), heat, told) is (Verdict.FATAL if judging else Verdict.OK)
    assert standing(LatchKey("xid"), heat, told) is Verdict.FATAL  # such a latch is there only where the Xid counts
    assert standing(LatchKey("lost"), heat, told) is Verdict.FATAL


def test_invalid_values_are_named_with_their_variable():
    told = asked({"DP_DISABLE_HEALTHCHECKS": "13,banana", "DP_ENABLE_HEALTHCHECKS": "-1", "XID_CONFIG": "48,all,x"})
    assert told.malformed == (
        "DP_DISABLE_HEALTHCHECKS: 'banana' is neither an Xid, nor 'xids', nor 'all', and is ignored",
        "DP_ENABLE_HEALTHCHECKS: '-1' is neither an Xid, nor 'xids', nor 'all', and is ignored",
        "XID_CONFIG: 'x' is not an Xid and is ignored",
        "XID_CONFIG: 'all' is not an Xid and is ignored",
    )
    assert told.xids.critical == {48}


# The verdict of an open latch


@pytest.mark.parametrize("word", SIGNAL_VERDICTS)
def test_the_policy_sets_the_verdict_of_a_signal(word):
    told = asked(signals={"nvlink": word})
    assert standing(LatchKey("nvlink"), Latch(NOTHING, Verdict.DEGRADED), told) is VERDICTS[word]
    assert standing(LatchKey("nvlink"), Latch(NOTHING, Verdict.FATAL), told) is VERDICTS[word]
    assert standing(LatchKey("nvlink"), Latch(NOTHING, Verdict.APP), told) is Verdict.APP
    assert standing(LatchKey("nvlink"), Latch(NOTHING), told) is standing(LatchKey("nvlink"), None, told) is Verdict.OK
    assert standing(LatchKey("fabric"), Latch(NOTHING, Verdict.FATAL), told) is Verdict.FATAL
