import dataclasses

import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.health.latch import Limits
from gpu_plugin.health.policy import complaints, limits, policy
from gpu_plugin.health.xids import XidPolicy

H200 = Gpu(uuid="GPU-aaaa", index=0, thresholds=Thresholds(shutdown=95, slowdown=89, memory_max=95, gpu_max=87))


def test_without_variables_the_policy_is_the_built_in_one():
    assert policy(resolve({}, {})) == XidPolicy()


def test_everything_disabled_and_one_xid_enabled_leaves_that_one():
    asked = policy(resolve({}, {"DP_DISABLE_HEALTHCHECKS": "all", "DP_ENABLE_HEALTHCHECKS": "79"}))
    assert [xid for xid in range(200) if asked.fatal(xid)] == [79]
    assert complaints(asked) == []


def test_words_that_are_none_are_told_with_their_variable():
    asked = policy(resolve({}, {"DP_DISABLE_HEALTHCHECKS": "13,banana", "DP_ENABLE_HEALTHCHECKS": "-1"}))
    assert complaints(asked) == [
        "DP_DISABLE_HEALTHCHECKS: 'banana' is neither an Xid, nor 'xids', nor 'all', and is ignored",
        "DP_ENABLE_HEALTHCHECKS: '-1' is neither an Xid, nor 'xids', nor 'all', and is ignored",
    ]


def test_limits_are_the_parts_own_and_the_operators_time():
    asked = dataclasses.replace(resolve({}, {}), temperature_recovery=60.0)
    assert limits(H200, asked) == Limits(95, 89, 60.0, watch_temperature=True)
    assert limits(Gpu(uuid="GPU-bbbb", index=1), asked) == Limits(None, None, 60.0, watch_temperature=True)


@pytest.mark.parametrize(("disabled", "watched"), [("all", False), ("xids", True), ("", True)])
def test_heat_is_watched_as_the_variables_say(disabled, watched):
    assert limits(H200, resolve({}, {"DP_DISABLE_HEALTHCHECKS": disabled})).watch_temperature is watched
