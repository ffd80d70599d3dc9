"""Verbs for operators: their effect on health and on the monitor, their errors and replies."""

from typing import cast

import pytest
from msgspec.structs import replace

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.event_log import EventLog
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.daemon.reported_errors import ReportedErrors
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import NOTHING, Latch, Proof, Verdict
from gpu_plugin.health.observation import Fault, Order, Sample, XidEvent
from gpu_plugin.health.signals import orders
from gpu_plugin.nvml.roster import ReleaseError
from gpu_plugin.runtime.control import RefusedError
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.state.event_store import EventStore
from gpu_plugin.state.log import StateLog
from gpu_plugin.state.recorder import Recorder
from tests.unit.health.ledgers import SEEN

GPUS = (
    Gpu("GPU-a", 0),
    Gpu("GPU-b", 1, mig_enabled=True, mig_devices=(MigDevice("MIG-b", 0, 7, 0, "1g.10gb"),)),
    Gpu("GPU-c", 2),
)
GOOD = Sample(temperature=40)


class StandIn:
    """A monitor that records calls. `trouble` makes `release` fail; `good` makes the look after `resume` succeed."""

    def __init__(self, health):
        self.health = health
        self.calls: list[tuple[str, frozenset[str] | None]] = []
        self.looks = 0
        self.trouble = ""
        self.good = True
        self.former: tuple[Gpu, ...] = ()
        self.node = Node(GPUS)

    async def release(self, uuids):
        self.calls.append(("release", uuids))
        if self.trouble:
            raise ReleaseError(self.trouble)

    async def resume(self, uuids):
        self.calls.append(("resume", uuids))
        for gpu in self.health.gpus:
            if self.good and (uuids is None or gpu.uuid in uuids):
                self.health.observe(gpu.uuid, GOOD)

    def look_now(self):
        self.looks += 1

    def dismiss(self, uuid):
        kept = tuple(gpu for gpu in self.former if gpu.uuid != uuid)
        dropped, self.former = kept != self.former, kept
        self.node = replace(self.node, absent=tuple(gpu for gpu in self.node.absent if gpu.uuid != uuid))
        return dropped

    def unsupported(self):
        return {"GPU-a": frozenset(), "GPU-b": frozenset({"temperature", "pcie_width"})}


class Desk:
    """Operations on three GPUs with a simulated monitor."""

    def __init__(self):
        self.health = HealthWatch(resolve({}, {}), "one", Pulse(), ReportedErrors())
        self.health.watch(GPUS)
        for gpu in GPUS:
            self.health.observe(gpu.uuid, SEEN)
        self.monitor: StandIn | None = StandIn(self.health)
        self.on_disk = True
        self.operations = Operations(self.health, cast("Now", self), cast("Recorder", self))

    async def written(self):
        return self.on_disk

    async def ask(self, verb, **request):
        return await self.operations.verbs[verb](request)

    async def done(self, verb, **request):
        reply = await self.ask(verb, **request)
        assert set(reply) == {"done", "outcome"}
        assert reply["done"].startswith(reply["outcome"])
        assert "gpu-plugin" not in reply["outcome"]  # commands are only in the reply, because a stored text may be cut
        return reply["done"]

    def reason(self, uuid):
        return self.health.ledger.reason(uuid)


@pytest.fixture
def desk():
    return Desk()


class TestNames:
    @pytest.mark.parametrize(
        ("gpu", "words"),
        [
            (9, "GPU 9: no GPU of this node has this index; the indices are 0, 1, 2"),
            (-1, "no GPU of this node has this index"),
            ("GPU-z", "GPU GPU-z: no GPU of this node has this name"),
            ("MIG-b", "MIG-b is a MIG device of GPU 1: name the GPU"),
            (True, "gpu: True is neither an index nor a uuid"),
            ([0], r"gpu: \[0\] is neither an index nor a uuid"),
        ],
    )
    @pytest.mark.parametrize("verb", ["cordon", "uncordon", "release", "resume"])
    async def test_an_unknown_gpu_is_refused(self, desk, verb, gpu, words):
        with pytest.raises(ConfigError, match=words):
            await desk.ask(verb, gpu=gpu)
        assert desk.monitor.calls == []

    @pytest.mark.parametrize("verb", ["cordon", "uncordon"])
    async def test_a_verb_for_one_gpu_requires_its_name(self, desk, verb):
        with pytest.raises(ConfigError, match="gpu: missing: which GPU, by index or uuid"):
            await desk.ask(verb)

    @pytest.mark.parametrize("verb", ["cordon", "uncordon", "release", "resume"])
    async def test_an_unknown_field_is_refused(self, desk, verb):
        with pytest.raises(ConfigError, match="force: not a field of this verb"):
            await desk.ask(verb, gpu=0, force=True)

    async def test_an_ambiguous_index_is_refused(self, desk):
        desk.health.watch((*GPUS, Gpu("GPU-late", 2)))
        for verb in ("cordon", "uncordon", "release", "resume"):
            with pytest.raises(ConfigError, match="GPU-c and GPU-late have this index; give the uuid"):
                await desk.ask(verb, gpu=2)
        assert "is cordoned" in await desk.done("cordon", gpu="GPU-late")
        assert (desk.reason("GPU-c"), desk.reason("GPU-late")) == ("", "cordoned")

    async def test_verbs_before_any_gpu_is_known(self, desk):
        desk.health.watch(())
        desk.monitor = None
        with pytest.raises(RefusedError, match="no GPU of this node is known yet: the driver does not work"):
            await desk.ask("cordon", gpu=0)
        assert "All GPUs (no GPU is known yet): released" in await desk.done("release")
        assert [(entry.uuid, entry.signal) for entry in desk.health.evidence()] == [("*", "maintenance")]
        assert desk.operations.begin() is None, "whoever begins with this evidence releases all that it finds"
        assert "(no GPU is known yet): resumed." in await desk.done("resume")
        assert desk.health.evidence() == ()
        assert "nothing to resume" in await desk.done("resume")

    async def test_a_boot_ends_the_release_of_all(self, desk):
        desk.health.watch(())
        await desk.ask("release")
        desk.operations.booted()
        assert desk.operations.begin() == frozenset()


class TestCordon:
    async def test_a_cordon_lasts_until_it_is_lifted_and_both_are_idempotent(self, desk):
        for words in ("no new pod gets it", "cordoned already"):
            assert words in await desk.done("cordon", gpu=1)
            assert desk.reason("GPU-b") == "cordoned"
        for words in ("its cordon is lifted. It has no open fault or order.", "not cordoned, so nothing was changed."):
            assert words in await desk.done("uncordon", gpu=1)
            assert desk.reason("GPU-b") == ""

    async def test_the_newest_reason_of_a_cordon_is_shown(self, desk):
        for reason, told in [("fan is loud", "fan is loud"), ("", "fan is loud"), ("to be replaced", "to be replaced")]:
            await desk.ask("cordon", gpu=0, **({"reason": reason} if reason else {}))
            assert desk.reason("GPU-a") == f"cordoned: {told}"
        later = Desk()
        later.health.restore(desk.health.evidence(), GPUS)
        assert later.reason("GPU-a") == "cordoned: to be replaced"

    @pytest.mark.parametrize("cordoned", [True, False])
    async def test_lifting_a_cordon_clears_no_fault(self, desk, cordoned):
        desk.health.observe("GPU-a", XidEvent(48))
        if cordoned:
            await desk.ask("cordon", gpu=0)
            assert "GPU 0 (GPU-a): its cordon is lifted. Still" in await desk.done("uncordon", gpu=0)
        for _ in range(3):
            done = await desk.done("uncordon", gpu=0)
            assert "it is not cordoned, so nothing was changed. Still open: Xid 48" in done
            assert "(FATAL). To override: gpu-plugin uncordon GPU-a --override." in done
            assert "Xid 48" in desk.reason("GPU-a")

    @pytest.mark.parametrize("cordoned", [True, False])
    async def test_an_override_clears_faults_and_requests_a_look(self, desk, cordoned):
        desk.health.observe("GPU-a", XidEvent(48))
        if cordoned:
            await desk.ask("cordon", gpu=0)
        done = await desk.done("uncordon", gpu=0, override=True)
        assert ("its cordon is lifted, and its faults" in done) is cordoned
        assert (
            "its faults are overridden: Xid 48 (double-bit ECC error) is cleared. It has no open fault or order."
            in done
        )
        assert desk.reason("GPU-a") == ""
        assert desk.monitor.looks == 1
        assert "nothing was changed. It has no open fault or order." in await desk.done(
            "uncordon", gpu=0, override=True
        )

    async def test_an_override_lowers_a_condition_that_is_still_read(self, desk):
        for _ in range(2):
            desk.health.observe("GPU-a", Sample(temperature=40, remap_failure=True))
        done = await desk.done("uncordon", gpu=0, override=True)
        assert "is no more than DEGRADED. Still open:" in done
        assert "(DEGRADED)" in done
        assert desk.health.ledger.verdict("GPU-a") is Verdict.DEGRADED

    async def test_a_lost_gpu_cannot_be_overridden(self, desk, caplog):
        desk.health.observe("GPU-a", Sample(fault=Fault.LOST, detail="GPU is lost"))
        with pytest.raises(RefusedError, match="nothing was overridden: GPU is lost cannot be overridden"):
            await desk.ask("uncordon", gpu=0, override=True)
        assert "overridden" not in caplog.text
        assert desk.health.ledger.verdict("GPU-a") is Verdict.FATAL
        await desk.ask("cordon", gpu=0)
        done = await desk.done("uncordon", gpu=0, override=True)
        assert "its cordon is lifted. Still open: GPU is lost (FATAL)." in done

    async def test_the_cordon_of_an_absent_gpu_is_deleted(self, desk):
        old = Evidence(
            "zero", "GPU-gone", "cordon", Latch(orders.Reason(), Verdict.FATAL, "cordoned", 1.0, Proof.OPERATOR)
        )
        desk.health.restore((old,), GPUS)
        assert "Its cordon is lifted." in await desk.done("uncordon", gpu="GPU-gone")
        assert desk.health.evidence() == ()
        with pytest.raises(ConfigError, match="no GPU of this node has this name"):
            await desk.ask("uncordon", gpu="GPU-gone")

    async def test_other_evidence_of_an_absent_gpu_is_deleted_only_by_an_override(self, desk):
        cordon = Evidence(
            "zero", "GPU-gone", "cordon", Latch(orders.Reason(), Verdict.FATAL, "cordoned", 1.0, Proof.OPERATOR)
        )
        xid = Evidence("zero", "GPU-gone", "xid", Latch(NOTHING, Verdict.FATAL, "Xid 48", 1.0, Proof.RESET), "48")
        desk.health.restore((cordon, xid), GPUS)
        for words in ("Its cordon is lifted. Still open: Xid 48 (FATAL)", "It has no cordon, so nothing"):
            assert words in await desk.done("uncordon", gpu="GPU-gone")
            assert desk.health.evidence() == (xid,)
        assert "stored record is deleted" in await desk.done("uncordon", gpu="GPU-gone", override=True)
        assert desk.health.evidence() == ()

    async def test_the_placeholder_for_every_gpu_is_no_name(self, desk):
        desk.health.watch(())
        await desk.ask("release")
        with pytest.raises(RefusedError, match="no GPU of this node is known yet"):
            await desk.ask("uncordon", gpu="*", override=True)
        assert desk.operations.begin() is None

    async def test_an_override_is_true_or_false(self, desk):
        with pytest.raises(ConfigError, match="override: 'yes' is neither true nor false"):
            await desk.ask("uncordon", gpu=0, override="yes")


LOST = Gpu("GPU-4b5ed472", 7, pci_bus_id="00000000:61:00.0", model="NVIDIA H100", unreadable="it is not on the PCI bus")
STRANGER = Gpu("", -1, pci_bus_id="00000000:62:00.0", unreadable="the NVIDIA driver does not list it")
LOST_NAME = "GPU 0000:61:00.0 (GPU-4b5ed472, NVIDIA H100)"


class LoggedDesk(Desk):
    """Operations behind the event log, on a node with two missing GPUs."""

    def __init__(self, directory):
        super().__init__()
        assert self.monitor is not None
        self.monitor.former = (LOST,)
        self.monitor.node = Node(GPUS, absent=(LOST, STRANGER))
        self.log = EventLog(EventStore(StateLog(directory), lambda: 1.0), self.operations)

    async def ask(self, verb, **request):
        return await self.log.order(verb, self.operations.verbs[verb])(request)


class TestMissing:
    """Requests for missing GPUs by each of their names."""

    @pytest.fixture
    def desk(self, tmp_path):
        return LoggedDesk(tmp_path)

    @pytest.mark.parametrize("name", ["0000:61:00.0", "61:00.0", "GPU-4b5e", "4b5ed472", "GPU-4b5ed472"])
    async def test_an_override_deletes_a_missing_gpu_by_each_of_its_names(self, desk, name):
        done = await desk.done("uncordon", gpu=name, override=True)
        assert done == f"{LOST_NAME} is missing; its stored record is deleted."
        assert desk.monitor.former == ()
        assert [(event.uuid, event.bus_id) for event in desk.log.store.events] == [("GPU-4b5ed472", "0000:61:00.0")]
        with pytest.raises(ConfigError, match="no GPU of this node has this name"):
            await desk.ask("uncordon", gpu=name, override=True)

    async def test_the_former_index_of_a_missing_gpu_is_no_name(self, desk):
        with pytest.raises(ConfigError, match="no GPU of this node has this index"):
            await desk.ask("uncordon", gpu=7, override=True)
        assert desk.monitor.former == (LOST,)

    async def test_an_ambiguous_name_is_refused_with_both_gpus(self, desk):
        desk.health.watch((*GPUS, Gpu("GPU-4b5effff", 3)))
        with pytest.raises(
            ConfigError, match=r"GPU 3 \(GPU-4b5effff\) and GPU 0000:61:00.0 \(GPU-4b5ed472\): give its"
        ):
            await desk.ask("uncordon", gpu="GPU-4b5e", override=True)

    async def test_without_an_override_only_the_cordon_of_a_missing_gpu_is_lifted(self, desk):
        advice = "To delete its stored record: gpu-plugin uncordon GPU-4b5ed472 --override."
        done = await desk.done("uncordon", gpu="61:00.0")
        assert done == f"{LOST_NAME} is missing. It has no cordon, so nothing was changed. {advice}"
        cordon = Evidence(
            "zero", LOST.uuid, "cordon", Latch(orders.Reason(), Verdict.FATAL, "cordoned", 1.0, Proof.OPERATOR)
        )
        background = Evidence("zero", LOST.uuid, "background", Latch(NOTHING))
        desk.health.restore((cordon, background), GPUS)
        assert await desk.done("uncordon", gpu="61:00.0") == f"{LOST_NAME} is missing. Its cordon is lifted. {advice}"
        assert desk.health.evidence() == (background,)
        assert desk.monitor.former == (LOST,)

    async def test_a_gpu_that_is_still_on_the_bus_stays_missing(self, desk):
        def dismiss(_):
            desk.monitor.node = Node(GPUS, absent=(replace(LOST, uuid="", index=-1, unreadable="it has no driver"),))
            return True

        desk.monitor.dismiss = dismiss
        done = await desk.done("uncordon", gpu="GPU-4b5e", override=True)
        assert done.endswith("its stored record is deleted. It stays missing: it has no driver.")

    async def test_an_unknown_missing_gpu_has_no_record_to_delete(self, desk):
        with pytest.raises(
            RefusedError, match=r"GPU 0000:62:00.0 is missing: the NVIDIA .* There is no stored record of it"
        ):
            await desk.ask("uncordon", gpu="62:00.0", override=True)
        assert "To delete" not in await desk.done("uncordon", gpu="62:00.0")

    @pytest.mark.parametrize("verb", ["cordon", "release", "resume"])
    @pytest.mark.parametrize("name", ["0000:61:00.0", "GPU-4b5e", "GPU-4b5ed472"])
    async def test_other_orders_for_a_missing_gpu_are_refused_with_the_reason(self, desk, verb, name):
        with pytest.raises(
            RefusedError, match=r"GPU-4b5ed472, .* is missing, so this order .*: it is not on the PCI bus"
        ):
            await desk.ask(verb, gpu=name)
        assert desk.monitor.calls == []
        assert desk.health.evidence() == ()

    @pytest.mark.parametrize("verb", ["cordon", "uncordon", "release", "resume"])
    async def test_an_empty_name_and_an_unknown_field_are_refused(self, desk, verb):
        with pytest.raises(ConfigError, match="no GPU of this node has this name"):
            await desk.ask(verb, gpu="")
        with pytest.raises(ConfigError, match="force: not a field of this verb"):
            await desk.ask(verb, gpu=LOST.uuid, force=True)

    async def test_a_replaced_gpu_is_deleted_only_by_its_uuid(self, desk):
        desk.monitor.former = (LOST, Gpu("GPU-replaced", 0, pci_bus_id="00000000:1B:00.0"))
        desk.health.watch((Gpu("GPU-new", 0, pci_bus_id="00000000:1B:00.0"),))
        assert "GPU-new" in await desk.done("uncordon", gpu="1b:00.0", override=True)
        assert "stored record is deleted" in await desk.done("uncordon", gpu="GPU-rep", override=True)
        assert desk.monitor.former == (LOST,)

    async def test_a_listed_gpu_that_the_node_had_before_the_boot_is_overridden(self, desk):
        desk.monitor.dismiss = lambda _: True
        desk.health.observe("GPU-a", XidEvent(48))
        assert "Xid 48 (double-bit ECC error) is cleared" in await desk.done("uncordon", gpu=0, override=True)
        desk.health.observe("GPU-a", XidEvent(48))
        assert "Xid 48 (double-bit ECC error) is cleared" in await desk.done("uncordon", gpu="GPU-a", override=True)
        assert desk.reason("GPU-a") == ""


class TestRelease:
    async def test_one_gpu_is_released_and_resumed(self, desk):
        for _ in range(2):
            done = await desk.done("release", gpu=0)
            assert "GPU 0 (GPU-a): released" in done
            assert "NVML has no handle of it any more" in done
            assert desk.reason("GPU-a") == "maintenance"
            assert desk.reason("GPU-b") == ""
        assert await desk.done("resume", gpu=0) == "GPU 0 (GPU-a): resumed."
        assert "there was nothing to resume" in await desk.done("resume", gpu=0)
        assert desk.reason("GPU-a") == ""
        one = frozenset({"GPU-a"})
        assert desk.monitor.calls == [("release", one), ("release", one), ("resume", one), ("resume", one)]

    async def test_all_gpus_are_released_and_resumed(self, desk):
        assert "NVML is shut down" in await desk.done("release")
        assert all(desk.reason(gpu.uuid) == "maintenance" for gpu in GPUS)
        done = await desk.done("resume")
        assert "3 GPUs (0, 1, 2): resumed" in done
        assert not any(desk.reason(gpu.uuid) for gpu in GPUS)
        assert desk.monitor.calls == [("release", None), ("resume", None)]

    async def test_the_release_of_the_last_gpu_shuts_the_driver_down(self, desk):
        for gpu in (0, 1):
            assert "NVML has no handle of it" in await desk.done("release", gpu=gpu)
        assert "NVML is shut down" in await desk.done("release", gpu=2)
        assert desk.monitor.calls[-1] == ("release", None)
        await desk.ask("resume", gpu="GPU-b")
        assert desk.monitor.calls[-1] == ("resume", frozenset({"GPU-b"}))
        assert (desk.reason("GPU-a"), desk.reason("GPU-b")) == ("maintenance", "")

    async def test_a_gpu_whose_handles_cannot_be_dropped_is_still_held_back(self, desk):
        desk.monitor.trouble = "the driver's handles are not dropped yet: a call to it has not come back"
        with pytest.raises(
            RefusedError, match=r"GPU 1 \(GPU-b\): held back for maintenance, but the driver's handles are"
        ):
            await desk.ask("release", gpu=1)
        assert desk.reason("GPU-b") == "maintenance"

    async def test_a_resumed_gpu_is_held_back_until_it_answers(self, desk):
        await desk.ask("release", gpu=0)
        desk.monitor.good = False
        assert "No good look at GPU 0 (GPU-a) yet" in await desk.done("resume", gpu=0)
        assert desk.reason("GPU-a")
        desk.health.observe("GPU-a", GOOD)
        assert desk.reason("GPU-a") == ""

    async def test_other_faults_outlast_a_release(self, desk):
        desk.health.observe("GPU-a", XidEvent(79))
        await desk.ask("release", gpu=0)
        await desk.ask("resume", gpu=0)
        assert "Xid 79" in desk.reason("GPU-a")

    async def test_a_release_works_without_a_driver(self, desk):
        desk.monitor = None
        assert "released" in await desk.done("release", gpu=0)
        assert desk.operations.begin() == frozenset({"GPU-a"})

    async def test_the_next_process_restores_releases(self, desk):
        assert desk.operations.begin() == frozenset()
        await desk.ask("release", gpu=0)
        later = Desk()
        later.health.restore(desk.health.evidence(), GPUS)
        assert later.operations.begin() == frozenset({"GPU-a"})
        await desk.ask("release")
        later = Desk()
        later.health.restore(desk.health.evidence(), GPUS)
        assert later.operations.begin() is None

    async def test_gpus_found_during_a_release_of_all_are_released(self, desk):
        desk.health.watch(())
        await desk.ask("release")
        desk.health.watch(GPUS)
        desk.operations.found()
        assert all(desk.reason(gpu.uuid) == "maintenance" for gpu in GPUS)
        await desk.ask("resume", gpu=0)
        desk.health.watch((*GPUS, Gpu("GPU-late", 3)))
        desk.operations.found()
        desk.health.observe("GPU-late", GOOD)
        assert desk.reason("GPU-late") == ""


@pytest.mark.parametrize(
    ("verb", "request_"),
    [("cordon", {"gpu": 0}), ("uncordon", {"gpu": 2}), ("release", {"gpu": 0}), ("release", {})],
)
async def test_an_order_that_cannot_be_stored_is_in_force_and_refused(desk, verb, request_):
    desk.health.observe("GPU-c", Order("cordon"))
    desk.on_disk = False
    for _ in range(2):
        with pytest.raises(RefusedError, match="could not be written, so a restart of the daemon loses it"):
            await desk.ask(verb, **request_)
    assert (
        desk.reason(GPUS[request_.get("gpu", 0)].uuid)
        == {"cordon": "cordoned", "release": "maintenance", "uncordon": ""}[verb]
    )
    desk.on_disk = True
    assert await desk.done(verb, **request_)
