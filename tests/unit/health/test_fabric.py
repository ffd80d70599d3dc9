"""fabric: GPUs that have not joined their NVLink fabric, or whose fabric is not sound."""

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import FABRIC_CONFIGURATION_SHIFT, FabricCondition
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Fabric, Facts, Sample
from tests.unit.health.ledgers import LOST
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL


def look(state: int, status: int = 0, health_mask: int = 0, summary: int = 0) -> Sample:
    return Sample(nvlinks=(True, True), fabric=Fabric(state, status, health_mask, summary))


SHIFTS = {condition.name.lower(): int(condition) for condition in FabricCondition} | {
    "incorrect_configuration": FABRIC_CONFIGURATION_SHIFT,
    "gfm_state": 14,  # NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_GFM_STATE, which no verdict depends on
}


def bits(**values: int) -> int:
    """Return a mask with these fields, by the names of NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_*."""
    return sum(value << SHIFTS[name] for name, value in values.items())


JOINED, JOINING = look(3, 0, 0, 1), look(2)
UNSOUND, LIMITED = look(3, 0, 0, 2), look(3, 0, 0, 3)


@pytest.fixture
def gpu():
    return Watched("fabric", seen=False)


@pytest.mark.parametrize(
    ("values", "verdict", "named"),
    [
        ((0,), OK, []),
        ((0, 999, 0xFFFF, 2), OK, []),
        ((1,), FATAL, ["error 802"]),
        ((2,), FATAL, ["error 802"]),
        ((4,), FATAL, ["state 4", "error 802"]),
        ((3,), OK, []),
        ((3, 0, 0, 1), OK, []),
        ((3, 999), FATAL, ["NVML error 999"]),
        ((3, 0, 0, 2), FATAL, ["unhealthy"]),
        ((3, 0, 0, 3), DEGRADED, ["limited capacity"]),
        ((3, 0, bits(degraded_bw=2, route_unhealthy=2, incorrect_configuration=1), 1), OK, []),
        ((3, 0, bits(degraded_bw=1), 3), DEGRADED, ["bandwidth"]),
        ((3, 0, bits(route_recovery=1), 1), OK, []),
        ((3, 0, bits(route_unhealthy=1)), FATAL, ["route is unhealthy"]),
        ((3, 0, bits(access_timeout_recovery=1)), FATAL, ["access timeouts"]),
        ((3, 0, bits(incorrect_configuration=2)), FATAL, ["system GUID"]),
        ((3, 0, bits(incorrect_configuration=3)), FATAL, ["chassis serial number"]),
        ((3, 0, bits(incorrect_configuration=4)), FATAL, ["no partition"]),
        ((3, 0, bits(incorrect_configuration=5)), FATAL, ["too few NVLinks"]),
        ((3, 0, bits(incorrect_configuration=6)), FATAL, ["firmware"]),
        ((3, 0, bits(incorrect_configuration=7)), FATAL, ["location"]),
        ((3, 0, bits(incorrect_configuration=8)), FATAL, ["state of the GPU"]),
        ((3, 0, bits(incorrect_configuration=15)), FATAL, ["error 15"]),
        ((3, 0, bits(partition_assigned=1), 1), OK, []),
        ((3, 0, bits(partition_assigned=2)), DEGRADED, ["no partition"]),
        ((3, 0, bits(partition_assigned=2), 1), OK, []),
        ((3, 0, bits(gfm_state=2), 1), OK, []),
        ((3, 0, bits(route_recovery=1), 2), FATAL, ["route"]),
        ((3, 0, bits(route_recovery=1), 3), DEGRADED, ["route"]),
        ((3, 0, bits(degraded_bw=1, route_unhealthy=1, access_timeout_recovery=1), 2), FATAL, ["route", "timeouts"]),
    ],
)
def test_each_condition_has_a_verdict_and_is_named(values, verdict, named):
    gpu = Watched("fabric")
    assert gpu.steps(look(*values), look(*values))[-1] is verdict
    assert verdict is OK or all(name in gpu.latch.detail for name in named)


@pytest.mark.parametrize(
    ("seen", "verdicts"),
    [
        ([JOINING], [FATAL]),  # a single look is enough if it is the first of a process
        ([look(1)], [FATAL]),
        ([LOST, JOINING], [OK, FATAL]),
        ([UNSOUND, UNSOUND], [OK, FATAL]),
        ([look(3, 999), look(3, 999)], [OK, FATAL]),
        ([look(3, 0, 0x10), look(3, 0, 0x10)], [OK, FATAL]),
        ([LIMITED, LIMITED, UNSOUND, LIMITED, UNSOUND, UNSOUND], [OK, *[DEGRADED] * 4, FATAL]),
        ([JOINING, LIMITED, LIMITED, LIMITED], [FATAL, FATAL, FATAL, DEGRADED]),
        ([*[LIMITED] * 3, JOINED, JOINED, JOINED], [OK, *[DEGRADED] * 4, OK]),
        ([UNSOUND, UNSOUND, LIMITED, JOINED, JOINED, JOINED], [OK, *[FATAL] * 4, OK]),
        ([UNSOUND, UNSOUND, JOINED, JOINED, LIMITED], [OK, FATAL, FATAL, FATAL, DEGRADED]),
        ([JOINING, look(0), look(0), look(0)], [FATAL, FATAL, FATAL, OK]),  # there is no fabric
    ],
)
def test_the_verdict_follows_looks_that_agree(gpu, seen, verdicts):
    assert gpu.steps(*seen) == verdicts


@pytest.mark.parametrize(
    "seen",
    [
        Sample(nvlinks=(True, True)),
        look(0),
        Sample(),
        Sample(fabric=Fabric(2)),
        replace(UNSOUND, nvlinks=None, asked=frozenset({"fabric"})),
    ],
)
def test_without_nvlinks_or_a_fabric_nothing_is_judged(gpu, seen):
    assert gpu.see(*[seen] * 20) is OK
    assert gpu.stored is None


def test_a_look_that_did_not_request_the_links_ends_no_row(gpu):
    asked = replace(UNSOUND, nvlinks=None, asked=frozenset({"fabric"}))
    assert gpu.steps(UNSOUND, asked, UNSOUND) == [OK, OK, FATAL]


def test_in_mig_mode_there_is_no_fabric_to_join():
    whole, divided = Facts(), Facts(mig=True)
    for seen in (JOINING, UNSOUND, LIMITED):
        assert Watched("fabric", divided, seen=False).see(*[seen] * 5) is OK
    gpu = Watched("fabric", whole)
    assert gpu.see(UNSOUND, UNSOUND) is FATAL
    gpu.ledger.watch(GPU, divided)
    assert gpu.see(UNSOUND) is OK
    gpu.ledger.watch(GPU, whole)
    assert gpu.steps(UNSOUND, UNSOUND) == [OK, FATAL]


# Other GPUs of the node

PEER = "GPU-bbbb"
H100 = Facts(model="NVIDIA H100")
NO_FABRIC = Sample(nvlinks=(False, False), fabric=Fabric(0))


@pytest.mark.parametrize(
    ("silent", "facts", "peer", "verdict"),
    [
        (NO_FABRIC, H100, JOINED, DEGRADED),
        (Sample(fabric=Fabric(0)), H100, JOINED, DEGRADED),
        (Sample(fabric=Fabric(0), asked=frozenset({"fabric"})), H100, JOINED, DEGRADED),
        (NO_FABRIC, Facts(model="NVIDIA L4"), JOINED, OK),
        (NO_FABRIC, Facts(model="NVIDIA H100", mig=True), JOINED, OK),
        (NO_FABRIC, H100, NO_FABRIC, OK),
    ],
)
def test_a_gpu_without_a_fabric_is_degraded_if_a_peer_has_joined_one(silent, facts, peer, verdict):
    gpu = Watched("fabric", facts)
    gpu.ledger.watch(PEER, H100)
    gpu.ledger.observe(PEER, JOINED, gpu.now)
    gpu.ledger.observe(PEER, peer, gpu.now)
    assert gpu.steps(silent, silent) == [OK, verdict]
    assert gpu.see(*[silent] * 10) is verdict
    assert gpu.see(*[JOINED] * 3) is OK


@pytest.mark.parametrize("nvswitch", [True, False])
def test_the_advice_names_the_fabric_manager_or_a_setting_of_virtual_machines(nvswitch):
    gpu = Watched("fabric", Facts(nvswitch=nvswitch))
    assert gpu.see(JOINING, JOINING) is FATAL
    (change,) = gpu.changes
    assert ("NVreg_NvLinkDisable=1" in change.action) is not nvswitch
    assert "fabric manager" in change.action
