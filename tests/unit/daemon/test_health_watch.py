"""The health watch: reports of changes, and the effect of settings, boots and operators."""

import itertools
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.health_watch import UNLISTED, HealthWatch
from gpu_plugin.daemon.reported_errors import Error, ReportedErrors
from gpu_plugin.devices.node import Gpu, MigDevice
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import NOTHING, Latch, Proof, Transition, Verdict
from gpu_plugin.health.observation import ApplicationError, Fault, Order, Sample, XidEvent
from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.runtime.pulse import Pulse
from tests.unit.daemon.calling_pulse import CallingPulse
from tests.unit.health.ledgers import SEEN

GPU = Gpu("GPU-0", 0)
CUT = Gpu(
    "GPU-1",
    1,
    mig_enabled=True,
    mig_devices=(MigDevice("MIG-a", 0, 7, 0, "1g.10gb"), MigDevice("MIG-b", 1, 8, 0, "1g.10gb")),
)
GOOD = Sample(temperature=40)


def settings(disabled=""):
    return resolve({}, {"DP_DISABLE_HEALTHCHECKS": disabled})


class NotedErrors(ReportedErrors):
    """Notes each error."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def add(self, error):
        self.found.append(error)


class Watch(HealthWatch):
    """A health watch of two GPUs that records its changes."""

    def __init__(self):
        self.changed: list[str] = []
        self.found: list[Error] = []
        self.acts: list[str] = []
        super().__init__(settings(), "one", CallingPulse(partial(self.acts.append, "record")), NotedErrors(self.found))
        self.watch((GPU, CUT))
        for gpu in (GPU, CUT):
            self.ledger.observe(gpu.uuid, SEEN, 0.0)

    def _changed(self, uuid):
        self.changed.append(uuid)
        super()._changed(uuid)

    def fatal(self, uuid):
        return self.ledger.verdict(uuid) is Verdict.FATAL


@pytest.fixture
def watch():
    return Watch()


def evidence(uuid, signal="xid", detail="Xid 48", *, boot_id="one", verdict=Verdict.FATAL, proof=Proof.RESET, **more):
    memory = SIGNALS[signal].memory if signal in SIGNALS else NOTHING
    latch = Latch(memory, verdict, detail, 1.0, proof)
    return Evidence(boot_id, uuid, signal, latch, **{"part": "48", **more})


class TestObservations:
    def test_a_change_is_a_line_a_count_an_event_and_a_new_list(self, watch, caplog):
        heard: list[Transition] = []
        watch.reports.subscribe(heard.append)
        watch.observe("GPU-0", XidEvent(48))
        (change,) = heard
        assert (change.uuid, change.signal, change.xid, change.verdict) == ("GPU-0", "xid", 48, Verdict.FATAL)
        assert change.action
        assert "Xid 48" in change.detail
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert record.getMessage().startswith("GPU 0 (GPU-0) is Unhealthy: Xid 48 (")
        assert watch.reports.transitions == {("GPU-0", "xid", "FATAL"): 1}
        assert watch.changed == ["GPU-0"]

    def test_what_changes_nothing_is_told_to_nobody(self, watch, caplog):
        for _ in range(5):
            assert watch.observe("GPU-0", GOOD) is False
        assert (watch.changed, watch.reports.transitions, caplog.records) == ([], {}, [])

    def test_it_says_whether_another_look_soon_would_settle_something(self, watch):
        watch.observe("GPU-0", XidEvent(48))
        assert watch.observe("GPU-0", Sample(fault=Fault.ERROR, detail="unknown")) is True

    def test_every_xid_is_counted_by_its_class(self, watch):
        for xid in (31, 31, 48, 999):
            watch.observe("GPU-0", XidEvent(xid))
        assert watch.reports.xids == {
            ("GPU-0", 31, "application"): 2,
            ("GPU-0", 48, "reset"): 1,
            ("GPU-0", 999, UNLISTED): 1,
        }

    def test_a_storm_of_an_application_is_one_line_and_no_news(self, watch, caplog):
        caplog.set_level(logging.INFO)
        watch.observe("GPU-0", XidEvent(31))
        changed = list(watch.changed)
        for _ in range(300):
            watch.observe("GPU-0", XidEvent(31))
        assert caplog.text.count("is an application's error") == 1
        assert len(caplog.records) == 1
        assert watch.changed == changed
        assert watch.reports.xids["GPU-0", 31, "application"] == 301

    @pytest.mark.parametrize(
        ("uuid", "seen", "devices"),
        [
            ("GPU-0", XidEvent(31), set()),
            ("GPU-0", XidEvent(31, 0, 0), set()),
            ("GPU-1", XidEvent(31), set()),
            ("GPU-1", XidEvent(31, 8, 0), {"MIG-b"}),
            ("GPU-1", XidEvent(31, 7), {"MIG-a"}),
            ("GPU-1", XidEvent(31, 9, 0), set()),
        ],
    )
    def test_pods_are_asked_for_where_an_error_may_be_theirs(self, watch, uuid, seen, devices):
        watch.observe(uuid, seen)
        assert watch.found == [Error(uuid, 31, frozenset(devices))]

    def test_nobody_is_asked_for_what_is_no_application_s_error(self, watch):
        for xid in (48, 79, 154, 999):
            watch.observe("GPU-0", XidEvent(xid))
        assert watch.found == []

    def test_errors_of_several_pods_make_a_gpu_suspect(self, watch):
        for at in range(10):
            watch.observe("GPU-0", ApplicationError(31, frozenset({f"ns/{'ab'[at % 2]}"})))
        ((_, latch, verdict),) = watch.ledger.standing("GPU-0")
        assert "suspected wedged GPU" in latch.detail
        assert verdict is Verdict.DEGRADED
        assert watch.ledger.standing("GPU-1") == []

    def test_the_first_good_look_at_a_gpu_is_told_and_changes_no_verdict(self, watch):
        late = Gpu("GPU-2", 2)
        watch.watch((GPU, CUT, late))
        assert watch.fatal("GPU-2")
        watch.observe("GPU-2", GOOD)
        assert not watch.fatal("GPU-2")
        assert (watch.changed, watch.reports.transitions) == (["GPU-2"], {})


class TestMemory:
    def test_an_earlier_process_s_evidence_counts_as_soon_as_its_gpu_is_known(self, watch, caplog):
        watch.restore((evidence("GPU-0"), evidence("GPU-9")), (GPU,))
        assert watch.fatal("GPU-0")
        assert [entry.uuid for entry in watch.evidence()] == ["GPU-0", "GPU-9"]
        assert caplog.text.count("has the stored verdict FATAL: Xid 48") == 2
        watch.watch((GPU, Gpu("GPU-9", 9)))
        assert watch.fatal("GPU-9")
        assert watch.past == ()

    def test_a_remembered_baseline_is_no_accusation(self, watch, caplog):
        watch.restore((evidence("GPU-0", "nvlink", verdict=Verdict.OK, detail="", part=""),), (GPU,))
        assert caplog.records == []

    def test_what_is_remembered_of_a_gpu_that_never_came_can_be_forgotten(self, watch):
        watch.restore((evidence("GPU-9"), evidence("GPU-8")), (GPU,))
        revision = watch.ledger.revision
        assert watch.drop_past("GPU-9")
        assert watch.ledger.revision > revision  # so the change is stored
        assert not watch.drop_past("GPU-9")
        assert not watch.drop_past("GPU-0")
        assert [entry.uuid for entry in watch.past] == ["GPU-8"]

    def test_a_release_is_remembered_until_it_is_resumed(self, watch):
        assert watch.released() == frozenset()
        watch.observe("GPU-0", Order("release"))
        watch.observe("GPU-1", Order("cordon"))
        assert watch.released() == {"GPU-0"}
        later = Watch()
        later.restore(watch.evidence(), (GPU,))
        assert later.released() == {"GPU-0"}
        later.observe("GPU-0", Order("resume"))
        assert later.released() == frozenset()
        assert later.fatal("GPU-0")  # not before a good look
        later.observe("GPU-0", GOOD)
        assert not later.fatal("GPU-0")

    def test_a_boot_under_a_running_process_leaves_cordons_of_what_is_not_found(self, watch):
        watch.restore((evidence("GPU-9"), evidence("GPU-9", "cordon", part="", proof=Proof.OPERATOR)), (GPU, CUT))
        watch.observe("GPU-0", XidEvent(79))
        watch.booted("two")
        assert [(entry.uuid, entry.signal) for entry in watch.past] == [("GPU-9", "cordon")]
        assert {entry.boot_id for entry in watch.evidence() if entry.uuid == "GPU-0"} == {"two"}
        assert watch.changed[-2:] == ["GPU-0", "GPU-1"]
        for _ in range(3):
            watch.observe("GPU-0", GOOD)
        assert not watch.fatal("GPU-0")


class TestSettings:
    def test_another_policy_holds_for_what_is_open_already_and_every_gpu_is_told_again(self, watch, caplog):
        caplog.set_level(logging.INFO)
        for _ in range(2):
            watch.observe("GPU-0", Sample(temperature=40, recovery_action=1))
        assert watch.fatal("GPU-0")
        watch.changed.clear()
        watch.apply_settings(settings("all"))
        assert not watch.fatal("GPU-0")
        assert watch.changed == ["GPU-0", "GPU-1"]
        assert watch.reports.transitions["GPU-0", "recovery-action", "OK"] == 1
        watch.apply_settings(settings())
        assert watch.fatal("GPU-0")
        assert watch.reports.transitions["GPU-0", "recovery-action", "FATAL"] == 2

    def test_malformed_words_are_logged_at_the_start_and_when_they_change(self, watch, caplog):
        HealthWatch(settings("nonsense"), "one", Pulse(), ReportedErrors()).restore(())
        assert caplog.text.count("DP_DISABLE_HEALTHCHECKS: 'nonsense' is neither an Xid") == 1
        watch.apply_settings(settings("48,heat"))
        watch.apply_settings(settings("48,heat"))
        assert caplog.text.count("'heat' is neither an Xid") == 1
        watch.apply_settings(settings())
        watch.apply_settings(settings("heat"))
        assert caplog.text.count("'heat' is neither an Xid") == 2


def test_an_operator_s_word_is_told_like_any_change(watch, caplog):
    caplog.set_level(logging.INFO)
    watch.observe("GPU-0", XidEvent(48))
    watch.changed.clear()
    watch.override("GPU-0")
    assert not watch.fatal("GPU-0")
    assert watch.changed == ["GPU-0"]
    assert "overridden by an operator" in caplog.text
    assert "over: Xid 48" in caplog.text


@pytest.mark.anyio
async def test_the_kubelet_hears_of_a_gpu_once_it_is_written_down(watch):
    disk, told = anyio.Event(), anyio.Event()

    async def written(seconds):
        watch.acts.append(f"wait {seconds:g} s")
        await disk.wait()

    def tell(uuid):
        watch.acts.append(uuid)
        if uuid == "GPU-1":
            told.set()

    recorder: Any = SimpleNamespace(written=written)
    inventory: Any = SimpleNamespace(health_changed=tell)
    async with anyio.create_task_group() as group:
        group.start_soon(watch.publish, recorder, inventory)
        watch.observe("GPU-1", XidEvent(79))
        watch.observe("GPU-0", XidEvent(79))
        await anyio.wait_all_tasks_blocked()
        assert watch.acts == ["record", "record", "wait 0.5 s"]
        disk.set()
        with anyio.fail_after(5):
            await told.wait()
        group.cancel_scope.cancel()
    assert watch.acts[3:] == ["GPU-0", "GPU-1"]


def test_a_wall_clock_that_was_corrected_between_two_processes_changes_nothing_of_when():
    """The clock was thirty days fast. A hold with half an hour left must neither end nor last thirty days."""
    month, since_boot = 30 * 86_400.0, 5_000.0

    def process(wall: float, clock: float) -> HealthWatch:
        ticks = itertools.count(step=6)  # seconds, each time that it is asked
        made = HealthWatch(
            settings(), "one", Pulse(), ReportedErrors(), wall=lambda: wall, clock=lambda: clock + next(ticks)
        )
        made.watch((GPU,))
        made.observe("GPU-0", GOOD)
        return made

    wrong, true = 1_700_000_000.0 + month, 1_700_000_000.0
    first = process(wrong, since_boot)
    for _ in range(3):
        first.observe("GPU-0", Sample(fault=Fault.RESET_REQUIRED))
        for _ in range(3):
            first.observe("GPU-0", GOOD)
    assert first.ledger.verdict("GPU-0") is Verdict.FATAL
    first.observe("GPU-0", XidEvent(94))
    for later, held in ((1_800.0, True), (4_000.0, False)):
        for wall in (true + later, wrong + later, true - month + later):
            second = process(wall, since_boot + later)
            second.restore(first.evidence(), (GPU,))
            second.observe("GPU-0", GOOD)
            assert (second.ledger.verdict("GPU-0") is Verdict.FATAL) is held
            second.observe("GPU-0", XidEvent(94))
            second.observe("GPU-0", XidEvent(94))
            assert any(latch.detail.endswith("3 times within 24h") for _, latch, _ in second.ledger.standing("GPU-0"))


class TestEvidenceOfAnotherDaemon:
    def test_it_counts_for_a_gpu_that_is_known_and_is_written_down(self, watch):
        revision = watch.ledger.revision
        watch.adopt((evidence(GPU.uuid),))
        assert watch.fatal(GPU.uuid)
        assert watch.changed == [GPU.uuid]
        assert watch.ledger.revision > revision

    def test_it_waits_for_a_gpu_that_is_not_found_yet(self, watch):
        late = Gpu("GPU-late", 7)
        watch.adopt((evidence(late.uuid),))
        watch.watch((*watch.gpus, late))
        watch.ledger.observe(late.uuid, SEEN, 2.0)
        assert watch.fatal(late.uuid)
