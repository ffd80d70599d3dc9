"""GPUs that wait for their NVLink fabric, or whose fabric is not sound."""

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import FABRIC_CONFIGURATION_SHIFT, FabricCondition
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Fabric, Facts, Fault, Sample
from gpu_plugin.health.signals.fabric import judge
from tests.unit.health.looked_at import LookedAt
from tests.unit.health.watching import GPU

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
UP = (True, True)
NOT_STARTED, IN_PROGRESS, COMPLETED = 1, 2, 3


def look(state: int, status: int = 0, health_mask: int = 0, summary: int = 0) -> Sample:
    return Sample(nvlinks=UP, fabric=Fabric(state, status, health_mask, summary))


SHIFTS = {condition.name.lower(): int(condition) for condition in FabricCondition} | {
    "incorrect_configuration": FABRIC_CONFIGURATION_SHIFT,
    "gfm_state": 14,  # NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_GFM_STATE, which no verdict depends on
}


def bits(**values: int) -> int:
    """A mask with these fields, by the names of NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_*."""
    return sum(value << SHIFTS[name] for name, value in values.items())


JOINED = look(COMPLETED, summary=1)
JOINING = look(IN_PROGRESS)
UNSOUND = look(COMPLETED, summary=2)
LIMITED = look(COMPLETED, summary=3)
UNREAD, LOST = Sample(nvlinks=UP), Sample(fault=Fault.LOST, detail="the GPU is lost")


def test_a_gpu_in_mig_mode_has_no_fabric_to_wait_for_and_is_judged_afresh_after_it():
    whole, divided = Facts(), Facts(mig=True)
    for seen in (JOINING, UNSOUND, LIMITED):
        assert LookedAt("fabric", divided, seen=False).see(*[seen] * 5) is OK
    gpu = LookedAt("fabric", whole)
    assert gpu.see(UNSOUND, UNSOUND) is FATAL
    gpu.ledger.watch(GPU, divided)
    assert gpu.see(UNSOUND) is OK
    gpu.ledger.watch(GPU, whole)
    assert gpu.told(UNSOUND, UNSOUND) == [OK, FATAL]


@pytest.fixture
def gpu():
    return LookedAt("fabric", seen=False)


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (Fabric(0), OK, ""),
        (Fabric(0, 999, 0xFFFF, 2), OK, ""),
        (Fabric(1), FATAL, "the GPU has not begun to join its NVLink fabric, CUDA would fail with error 802"),
        (Fabric(2), FATAL, "the GPU is still joining its NVLink fabric, CUDA would fail with error 802"),
        (Fabric(4), FATAL, "the GPU is in state 4 of joining its NVLink fabric, CUDA would fail with error 802"),
        (Fabric(3), OK, ""),
        (Fabric(3, summary=1), OK, ""),
        (Fabric(3, 999), FATAL, "the GPU could not join its NVLink fabric: NVML error 999"),
        (Fabric(3, summary=2), FATAL, "the driver calls it unhealthy"),
        (Fabric(3, summary=3), DEGRADED, "the driver speaks of limited capacity"),
        (Fabric(3, 0, bits(degraded_bw=2, route_unhealthy=2, incorrect_configuration=1), 1), OK, ""),
        (Fabric(3, 0, bits(degraded_bw=1), 3), DEGRADED, "is limited: its bandwidth is degraded"),
        (Fabric(3, 0, bits(route_recovery=1), 1), OK, ""),
        (Fabric(3, 0, bits(route_unhealthy=1)), FATAL, "is not sound: its route is unhealthy"),
        (Fabric(3, 0, bits(access_timeout_recovery=1)), FATAL, "it is recovering from access timeouts"),
        (Fabric(3, 0, bits(incorrect_configuration=2)), FATAL, "a wrong system GUID"),
        (Fabric(3, 0, bits(incorrect_configuration=3)), FATAL, "a wrong chassis serial number"),
        (Fabric(3, 0, bits(incorrect_configuration=4)), FATAL, "no partition"),
        (Fabric(3, 0, bits(incorrect_configuration=5)), FATAL, "too few NVLinks"),
        (Fabric(3, 0, bits(incorrect_configuration=6)), FATAL, "incompatible GPU firmware"),
        (Fabric(3, 0, bits(incorrect_configuration=7)), FATAL, "an invalid location"),
        (Fabric(3, 0, bits(incorrect_configuration=8)), FATAL, "an invalid state of the GPU"),
        (Fabric(3, 0, bits(incorrect_configuration=15)), FATAL, "error 15"),
        (Fabric(3, 0, bits(partition_assigned=1), 1), OK, ""),
        (Fabric(3, 0, bits(partition_assigned=2)), DEGRADED, "no partition is assigned"),
        (Fabric(3, 0, bits(partition_assigned=2), 1), OK, ""),
        (Fabric(3, 0, bits(gfm_state=2), 1), OK, ""),
        (Fabric(3, 0, bits(route_recovery=1), 2), FATAL, "is not sound: its route is being recovered"),
        (Fabric(3, 0, bits(route_recovery=1), 3), DEGRADED, "is limited: its route is being recovered"),
        (
            Fabric(3, 0, bits(degraded_bw=1, route_unhealthy=1, access_timeout_recovery=1), 2),
            FATAL,
            "its route is unhealthy, it is recovering from access timeouts",
        ),
    ],
)
def test_what_each_condition_means(found, verdict, words):
    judged, told = judge(found)
    assert judged is verdict
    assert words in told
    assert bool(told) is (verdict is not OK)


@pytest.mark.parametrize("state", [NOT_STARTED, IN_PROGRESS])
def test_a_gpu_that_is_not_ready_at_the_first_look_of_all_is_held_back_at_once(gpu, state):
    assert gpu.see(look(state)) is FATAL
    assert "error 802" in gpu.ledger.reason(GPU)


def test_a_gpu_that_is_not_ready_at_the_first_look_that_reaches_it_is_held_back_at_once(gpu):
    assert gpu.told(LOST, JOINING) == [OK, FATAL]


def test_later_it_takes_two_looks(gpu):
    assert gpu.told(JOINED, JOINING, JOINING) == [OK, OK, FATAL]
    assert gpu.latch.since == gpu.now - 5


@pytest.mark.parametrize("bad", [UNSOUND, look(COMPLETED, status=999), look(COMPLETED, health_mask=0x10)])
def test_a_fabric_that_is_not_sound_takes_two_looks_even_at_the_first(gpu, bad):
    assert gpu.told(bad, bad) == [OK, FATAL]


def test_a_fabric_that_is_limited_degrades_at_two_looks(gpu):
    assert gpu.told(JOINED, LIMITED, LIMITED) == [OK, OK, DEGRADED]
    assert gpu.see(*[LIMITED] * 50) is DEGRADED
    assert len(gpu.changes) == 1


def test_worse_takes_two_looks_too(gpu):
    assert gpu.told(LIMITED, LIMITED, UNSOUND, LIMITED, UNSOUND, UNSOUND) == [OK, *[DEGRADED] * 4, FATAL]
    assert "unhealthy" in gpu.detail


@pytest.mark.parametrize("bad", [JOINING, UNSOUND, LIMITED])
def test_three_looks_at_a_sound_fabric_end_it(gpu, bad):
    gpu.see(bad, bad)
    held = gpu.verdict
    assert held is not OK
    assert gpu.told(JOINED, JOINED, JOINED) == [held, held, OK]
    assert gpu.remembered is None


def test_it_stays_for_as_long_as_it_is_not_ready(gpu):
    assert gpu.see(*[JOINING] * 100) is FATAL
    assert len(gpu.changes) == 1
    assert not gpu.ledger.suspicious(GPU)


def test_coming_and_going_by_single_looks_neither_opens_nor_ends_it(gpu):
    assert gpu.see(JOINED, *[UNSOUND, JOINED] * 20) is OK
    assert gpu.see(UNSOUND, UNSOUND, *[JOINED, JOINED, UNSOUND] * 20) is FATAL
    assert len(gpu.changes) == 1


def test_a_fabric_that_completes_with_limits_is_no_longer_fatal_after_three_looks(gpu):
    assert gpu.told(JOINING, LIMITED, LIMITED, LIMITED) == [FATAL, FATAL, FATAL, DEGRADED]
    assert "limited capacity" in gpu.detail
    assert gpu.told(JOINED, JOINED, JOINED) == [DEGRADED, DEGRADED, OK]


def test_limits_among_good_looks_are_no_end(gpu):
    gpu.see(UNSOUND, UNSOUND)
    assert gpu.told(LIMITED, JOINED, JOINED, JOINED) == [FATAL, FATAL, FATAL, OK]
    gpu.see(UNSOUND, UNSOUND)
    assert gpu.told(JOINED, JOINED, LIMITED) == [FATAL, FATAL, DEGRADED]


@pytest.mark.parametrize("unread", [UNREAD, LOST, Sample(fabric=Fabric(COMPLETED, summary=1))])
def test_what_cannot_be_read_proves_nothing(gpu, unread):
    assert gpu.see(JOINED, UNSOUND, unread, UNSOUND) is OK
    assert gpu.see(UNSOUND) is FATAL
    assert gpu.see(*[unread] * 20) is FATAL
    assert gpu.see(JOINED, JOINED, unread, JOINED, JOINED) is FATAL
    assert gpu.see(JOINED) is OK


def test_a_gpu_without_nvlinks_has_no_fabric_to_wait_for(gpu):
    assert gpu.see(*[Sample(fabric=Fabric(IN_PROGRESS))] * 20) is OK
    assert gpu.remembered is None


@pytest.mark.parametrize("silent", [UNREAD, look(0), Sample()])
def test_a_part_without_a_fabric_is_never_judged(gpu, silent):
    assert gpu.see(*[silent] * 20) is OK
    assert gpu.remembered is None


def test_a_driver_that_says_that_there_is_none_ends_it_too(gpu):
    assert gpu.told(JOINING, look(0), look(0), look(0)) == [FATAL, FATAL, FATAL, OK]


def test_an_operator_may_vouch_for_it_until_it_gets_better(gpu):
    gpu.see(JOINING)
    assert gpu.vouch() is DEGRADED
    assert gpu.see(*[JOINING] * 20) is DEGRADED
    assert gpu.see(*[JOINED] * 3) is OK
    assert gpu.see(JOINING, JOINING) is FATAL


def test_a_restart_changes_nothing_and_gathers_its_proof_anew(gpu):
    gpu.see(JOINING, JOINED, JOINED)
    assert gpu.restart() is FATAL
    assert gpu.told(JOINED, JOINED, JOINED) == [FATAL, FATAL, OK]


def test_a_look_that_did_not_ask_for_the_links_says_nothing_of_the_fabric(gpu):
    asked = replace(UNSOUND, nvlinks=None, asked=frozenset({"fabric"}))
    assert gpu.see(*[asked] * 5) is OK
    assert gpu.told(UNSOUND, asked, UNSOUND) == [OK, OK, FATAL], "and it ends no row"


# Beside other GPUs

PEER = "GPU-bbbb"
H100 = Facts(model="NVIDIA H100")
NO_FABRIC = Sample(nvlinks=(False, False), fabric=Fabric(0))


@pytest.fixture
def beside():
    """A GPU beside another that has joined its fabric."""
    gpu = LookedAt("fabric", H100)
    gpu.ledger.watch(PEER, H100)
    gpu.ledger.observe(PEER, JOINED, gpu.now)
    return gpu


@pytest.mark.parametrize(
    "silent", [NO_FABRIC, Sample(fabric=Fabric(0)), Sample(fabric=Fabric(0), asked=frozenset({"fabric"}))]
)
def test_a_gpu_without_a_fabric_beside_others_that_joined_is_degraded(beside, silent):
    assert beside.told(silent, silent) == [OK, DEGRADED]
    assert "fabric" in beside.detail
    assert beside.see(*[silent] * 10) is DEGRADED
    assert beside.see(*[JOINED] * 3) is OK


@pytest.mark.parametrize("facts", [Facts(model="NVIDIA L4"), Facts(model="NVIDIA H100", mig=True)])
def test_a_gpu_of_another_model_or_in_mig_mode_is_not_compared(beside, facts):
    beside.ledger.watch(GPU, facts)
    assert beside.see(*[NO_FABRIC] * 5) is OK


def test_a_gpu_without_a_fabric_is_no_fault_where_none_has_joined(beside):
    beside.ledger.observe(PEER, NO_FABRIC, beside.now)
    assert beside.see(*[NO_FABRIC] * 5) is OK


@pytest.mark.parametrize("nvswitch", [True, False])
def test_a_gpu_that_waits_for_its_fabric_without_a_switch_may_be_in_a_virtual_machine(nvswitch):
    gpu = LookedAt("fabric", Facts(nvswitch=nvswitch))
    assert gpu.see(JOINING, JOINING) is FATAL
    (change,) = gpu.changes
    assert ("NVreg_NvLinkDisable=1" in change.action) is not nvswitch
    assert "fabric manager" in change.action
