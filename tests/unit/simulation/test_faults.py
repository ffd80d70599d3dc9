import threading
import time

import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, FI_TOTAL_ENERGY_CONSUMPTION, EventType, Return, TopologyLevel
from gpu_plugin.nvml.port import Event, Field, NvmlError, PcieLink, RemappedRows
from gpu_plugin.simulation import faults
from gpu_plugin.simulation.driver import LINK_FIELDS, SimulatedDriver
from gpu_plugin.simulation.gpu import FABRICS
from gpu_plugin.simulation.hardware import STATE_FILE, SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

from .opened import code, described, make_node, opened

ANY = EventType.DOUBLE_BIT_ECC | EventType.XID_CRITICAL | EventType.GPU_RECOVERY_ACTION


class Bench:
    """GPU 0 of a simulated node, with all of its events asked for."""

    def __init__(self, name="hgx-h100", state=None, **more):
        self.node = make_node(name, state, **more)
        self.driver = opened(self.node)
        self.gpu = self.driver.handle_by_index(0)
        self.events = self.driver.event_set()
        supported = self.driver.supported_event_types(self.gpu)
        self.driver.register_events(self.gpu, ANY & supported, self.events)

    def apply(self, **request):
        return faults.apply(self.node, {"gpu": 0} | {name.replace("_", "-"): value for name, value in request.items()})

    def heard(self):
        found: list[tuple[int, int]] = []
        while True:
            try:
                event = self.driver.wait(self.events, 0)
            except NvmlError as error:
                assert error.code == Return.TIMEOUT  # noqa: PT017
                return found
            assert event.handle == self.gpu
            found.append((event.kind, event.data))

    def field(self, number):
        """A field of the GPU, or its sum over the NVLinks; None where it is refused."""
        links = range(18) if number in LINK_FIELDS else (0,)
        told = self.driver.field_values(self.gpu, tuple(Field(number, link) for link in links))
        values = [value for value in told if not isinstance(value, NvmlError)]
        return sum(values) if values else None


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def old():
    """A part of before row remapping and recovery actions."""
    return Bench("t4-4")


# Each fault and its end


def place(bench):
    """The place of the GPU by NVML and by sysfs."""
    path = SimulatedHost(bench.node).pci_path(bench.driver.pci_bus_id(bench.gpu))
    try:
        return bench.driver.common_ancestor(bench.gpu, bench.driver.handle_by_index(1)), path
    except NvmlError as error:
        return error.code, path


READINGS = {
    "temperature": lambda b: b.driver.temperature(b.gpu),
    "margin": lambda b: b.driver.margin_temperature(b.gpu),
    "memory-temperature": lambda b: b.field(82),
    "clocks-event-reasons": lambda b: b.driver.clocks_event_reasons(b.gpu),
    "persistence-mode": lambda b: b.driver.persistence_mode(b.gpu),
    "ecc-uncorrected": lambda b: b.driver.uncorrected_ecc_errors(b.gpu),
    "remap-pending": lambda b: b.driver.remapped_rows(b.gpu).pending,
    "remap-failure": lambda b: b.driver.remapped_rows(b.gpu).failure,
    "retired-pages": lambda b: b.field(30),
    "retirement-pending": lambda b: b.driver.retired_pages_pending(b.gpu),
    "sram-threshold": lambda b: b.driver.sram_threshold_exceeded(b.gpu),
    "unrepairable-memory": lambda b: b.driver.unrepairable_memory(b.gpu),
    "recovery-action": lambda b: b.field(230),
    "nvlink-down": lambda b: b.driver.nvlink_states(b.gpu).index(False) if not all(links(b)) else None,
    "nvlink-errors": lambda b: b.field(214),
    "nvlink-crc-errors": lambda b: b.field(38),
    "fabric": lambda b: b.driver.fabric(b.gpu),
    "topology": place,
    "pcie-width": lambda b: b.driver.pcie_link(b.gpu),
    "pcie-replays": lambda b: b.driver.pcie_replays(b.gpu),
    "pcie-fatal-errors": lambda b: b.field(180),
    "slow": lambda b: b.node.condition(0).slow,
}


def links(bench):
    return bench.driver.nvlink_states(bench.gpu)


@pytest.mark.parametrize(
    ("name", "value", "reading", "resettable"),
    [
        ("temperature", 91, 91, False),
        ("margin", -3, -3, False),
        ("memory-temperature", 99, 99, False),
        ("clocks-event-reasons", 0x40, 0x40, False),
        ("ecc-uncorrected", 2, 2, True),
        ("remap-pending", True, True, True),
        ("remap-failure", True, True, False),
        ("retired-pages", 61, 61, False),
        ("retirement-pending", True, True, True),
        ("sram-threshold", True, True, False),
        ("unrepairable-memory", True, True, False),
        ("recovery-action", "gpu-reset", 1, True),
        ("recovery-action", "node-reboot", 2, True),
        ("recovery-action", "drain-p2p", 3, True),
        ("recovery-action", "drain-and-reset", 4, True),
        ("recovery-action", "recover-imex-domain", 5, True),
        ("recovery-action", "bus-reset", 6, True),
        ("recovery-action", "system-reboot", 7, True),
        ("persistence-mode", "off", False, False),
        ("nvlink-down", 17, 17, True),
        ("nvlink-errors", 1, 1, True),
        ("nvlink-crc-errors", 101, 101, True),
        ("fabric", "unhealthy", FABRICS["unhealthy"], True),
        ("fabric", "in-progress", FABRICS["in-progress"], True),
        ("fabric", "limited", FABRICS["limited"], True),
        ("topology", "unreadable", (Return.UNKNOWN, "/sys/devices/pci0000:1a/0000:1a:01.0/0000:1b:00.0"), False),
        ("topology", "unknown", (Return.UNKNOWN, ""), False),
        ("pcie-width", 8, PcieLink(8, 16), False),
        ("pcie-replays", 51, 51, True),
        ("pcie-fatal-errors", 1, 1, True),
        ("slow", 0.001, 0.001, False),
    ],
)
def test_a_fault_shows_until_it_is_ended(tmp_path, name, value, reading, resettable):
    model = "t4-4" if name.startswith("retire") else "hgx-h100"
    bench, read = Bench(model, tmp_path), READINGS[name]
    fine = read(bench)
    assert fine != reading
    assert bench.apply(**{name: value}).split(": ")[0].endswith(f", {bench.node.profile.gpus[0].uuid})")
    assert read(bench) == reading
    assert read(Bench(model, tmp_path)) == reading  # another daemon
    bench.apply(reset=True)
    assert read(bench) == (fine if resettable else reading)
    bench.apply(heal=True)
    assert read(bench) == fine
    assert read(Bench(model, tmp_path)) == fine


def test_every_fault_of_a_part_has_its_reading():
    others = (
        "nvlink-up ecc-cleared energy-dip xid event lost vanish return hang error mig reset reset-keeping-energy heal"
    )
    assert set(faults.FAULTS) == {*READINGS, *others.split()}


def test_the_margin_follows_the_temperature(bench):
    bench.apply(temperature=92)
    assert bench.driver.margin_temperature(bench.gpu) == -5
    bench.apply(margin=7)
    assert (bench.driver.margin_temperature(bench.gpu), bench.driver.temperature(bench.gpu)) == (7, 92)


@pytest.mark.parametrize(
    "name", ["ecc-uncorrected", "pcie-replays", "pcie-fatal-errors", "nvlink-errors", "nvlink-crc-errors"]
)
def test_errors_add_up_and_memory_errors_are_events(bench, name):
    bench.apply(**{name: 2})
    bench.apply(**{name: 5})
    assert READINGS[name](bench) == 7
    assert bench.heard() == [(EventType.DOUBLE_BIT_ECC, 0)] * 2 * (name == "ecc-uncorrected")


def test_a_row_that_waited_is_remapped_by_a_reset(bench):
    bench.apply(remap_pending=True)
    assert bench.driver.remapped_rows(bench.gpu) == RemappedRows(0, 1, pending=True)
    bench.apply(reset=True)
    assert bench.driver.remapped_rows(bench.gpu) == RemappedRows(0, 1)


def test_a_link_is_down_at_this_end_alone():
    bench = Bench("dgx1-v100")
    peer = bench.driver.handle_by_index(1)
    at = [bench.driver.nvlink_remote_bus_id(bench.gpu, link) for link in range(6)]
    link = at.index(bench.driver.pci_bus_id(peer))
    bench.apply(nvlink_down=link)
    assert bench.driver.nvlink_remote_bus_id(bench.gpu, link) is None
    assert not bench.driver.nvlink_to_switch(bench.gpu, link)
    assert links(bench) == tuple(each != link for each in range(6))
    assert all(bench.driver.nvlink_states(peer))
    other = (link + 1) % 6
    bench.apply(nvlink_down=other)
    bench.apply(nvlink_up=link)
    assert [each for each, active in enumerate(links(bench)) if not active] == [other]
    assert bench.driver.nvlink_remote_bus_id(bench.gpu, link) == at[link]


@pytest.mark.parametrize(
    ("value", "cluster", "clique"),
    [
        ("in-progress", "", 0),
        ("unhealthy", "7c1f0f4a92d84e53b0c66a1d3e5f8b27", 32766),
        ("completed", "7c1f0f4a92d84e53b0c66a1d3e5f8b27", 32766),
    ],
)
def test_a_fabric_has_a_cluster_once_it_is_completed(value, cluster, clique):
    bench = Bench("gb200-node")
    fine = bench.driver.fabric(bench.gpu)
    bench.apply(fabric="unhealthy")
    bench.apply(fabric=value)
    fabric = bench.driver.fabric(bench.gpu)
    assert (fabric.cluster, fabric.clique) == (cluster, clique)
    assert (fabric == fine) is (value == "completed")


def test_a_place_that_is_not_told_is_that_of_one_gpu(bench):
    other, third = bench.driver.handle_by_index(1), bench.driver.handle_by_index(2)
    bench.apply(topology="unreadable")
    with pytest.raises(NvmlError):
        bench.driver.common_ancestor(other, bench.gpu)
    assert bench.driver.common_ancestor(other, third) == TopologyLevel.NODE
    assert bench.apply(topology="readable").endswith(": NVML and sysfs report its place on PCIe.")
    assert bench.driver.common_ancestor(other, bench.gpu) == TopologyLevel.NODE


# The driver's requests


@pytest.mark.parametrize(
    ("xid", "action"),
    [(48, 1), (95, 1), (109, 0), (144, 0), (119, 1), (79, 2), (13, 0), (31, 0), (43, 0), (63, 0), (94, 0), (998, 0)],
)
def test_an_xid_has_the_driver_ask_for_what_ends_it(bench, xid, action):
    bench.apply(xid=xid)
    assert bench.field(230) == action
    asked = [(EventType.GPU_RECOVERY_ACTION, 0)] if action else []
    assert bench.heard() == [(EventType.XID_CRITICAL, xid), *asked]
    bench.apply(reset=True)
    assert bench.field(230) == 0


def test_what_is_asked_for_already_stays(bench):
    bench.apply(recovery_action="node-reboot")
    assert bench.heard() == [(EventType.GPU_RECOVERY_ACTION, 0)]
    bench.apply(xid=95)
    assert (bench.field(230), bench.heard()) == (2, [(EventType.XID_CRITICAL, 95)])


def test_a_driver_told_to_ask_for_nothing_does_so_until_reset(bench):
    assert bench.apply(recovery_action="none").endswith(": its driver requests no recovery after any Xid, until reset.")
    bench.apply(xid=79)
    assert bench.field(230) == 0
    bench.apply(reset=True)
    bench.apply(xid=79)
    assert bench.field(230) == 2


def test_an_old_part_asks_for_nothing(old):
    old.apply(xid=79)
    assert (old.field(230), old.heard()) == (None, [(EventType.XID_CRITICAL, 79)])


def test_what_a_driver_asks_for_after_an_xid_outlives_the_daemon(tmp_path):
    Bench(state=tmp_path).apply(xid=48)
    assert Bench(state=tmp_path).field(230) == 1


# Xids and events of instances


@pytest.mark.parametrize(
    ("instance", "heard"), [("2", (2, ALL_INSTANCES)), ("1/0", (1, 0)), ("0/0", (0, 0)), (None, (ALL_INSTANCES,) * 2)]
)
def test_an_xid_names_the_instances_asked_for(bench, instance, heard):
    said = bench.apply(xid=43) if instance is None else bench.apply(xid=43, instance=instance)
    assert faults.apply(bench.node, {"gpu": 2, "xid": 31}).endswith(
        "Xid 31 raised, and nothing listens for its events."
    )
    assert said.endswith(": Xid 43 raised." if instance is None else f": Xid 43 raised on instance {instance}.")
    assert bench.driver.wait(bench.events, 0) == Event(bench.gpu, 8, 43, *heard)


def test_an_event_of_any_type(bench):
    assert bench.apply(event=0x4000).endswith(": event of type 0x4000 sent, and nothing listens for it.")
    bench.driver.register_events(bench.gpu, 0x4800, bench.events)
    assert bench.apply(event=0x4000).endswith(": event of type 0x4000 sent.")
    bench.apply(event=0x1800)
    assert bench.heard() == [(0x4000, 0), (0x1800, 0)]


def test_a_part_posts_only_what_it_supports(old):
    assert old.node.post(0, EventType.GPU_RECOVERY_ACTION) == 0
    old.node.events.register(0, old.gpu, EventType.GPU_RECOVERY_ACTION, old.events)
    assert old.node.post(0, EventType.GPU_RECOVERY_ACTION) == 0
    assert old.heard() == []


def test_an_error_contained_in_an_instance_has_the_driver_ask_for_nothing(bench):
    assert bench.apply(xid=46, instance="1").endswith(": Xid 46 raised on instance 1.")
    assert bench.field(230) == 0
    bench.apply(xid=46)
    assert bench.field(230) == 1


@pytest.mark.parametrize(("times", "often"), [(1, "once"), (2, "2 times"), (None, "until the daemon ends")])
def test_a_driver_that_refuses_to_be_opened(bench, times, often):
    bench.driver.close()
    request = {"init-error": 999} | ({} if times is None else {"times": times})
    assert faults.apply(bench.node, request) == f"The node: its driver refuses to be opened with 999, {often}."
    for _ in range(times or 5):
        assert code(bench.driver.open) == Return.UNKNOWN
    if times is not None:
        bench.driver.open()
        assert bench.driver.device_count() == 8


# MIG


def mig(bench):
    """The mode, and the MIG profiles by index."""
    devices = bench.node.gpus[0].mig_devices
    return bench.driver.mig_mode(bench.gpu), None if devices is None else [each.instance.profile for each in devices]


def test_mig(bench):
    bench.driver.register_events(bench.gpu, EventType.MIG_CONFIG_CHANGE, bench.events)
    for value, done, found in (
        (" 3g.40gb, 1c.3g.40gb ", "in MIG mode, partitioned into 3g.40gb, 1c.3g.40gb.", ["3g.40gb", "1c.3g.40gb"]),
        ("", "in MIG mode, partitioned into nothing.", []),
        (" empty ", "in MIG mode, partitioned into nothing.", []),
        ("none", "out of MIG mode.", None),
    ):
        assert bench.apply(mig=value).endswith(f": {done}")
        assert mig(bench) == ((0, 0) if found is None else (1, 1), found)
        assert bench.heard() == [(EventType.MIG_CONFIG_CHANGE, 0)]


def test_mig_of_a_gpu_that_is_lost_or_hangs(bench):
    bench.node.lose(0)
    bench.node.hang(0, 3600)
    bench.apply(mig="7g.80gb")
    bench.apply(heal=True)
    assert mig(bench) == ((1, 1), ["7g.80gb"])


@pytest.mark.parametrize("name", ["l40s-pcie-8", "dgx1-v100", "t4-4"])
def test_mig_of_a_part_without_it(name):
    node = make_node(name)
    with pytest.raises(ConfigError) as caught:
        faults.apply(node, {"gpu": 0, "mig": "none"})
    assert str(caught.value) == f"mig: {node.profile.gpus[0].name}: the simulated node knows of no MIG profiles for it"


async def test_as_a_verb(bench):
    fault = faults.verb(bench.node)
    before = time.monotonic()
    reply = await fault({"gpu": bench.node.profile.gpus[3].uuid, "heal": True})
    assert reply["done"] == f"GPU 3 (0000:61:00.0, {bench.node.profile.gpus[3].uuid}): repaired and reset."
    assert before <= float(str(reply["at"])) <= time.monotonic()
    with pytest.raises(ConfigError, match="GPU 9"):
        await fault({"gpu": 9, "heal": True})


# What cannot be

FLAGS = [
    "ecc-cleared",
    "remap-pending",
    "remap-failure",
    "retirement-pending",
    "sram-threshold",
    "unrepairable-memory",
    "lost",
    "vanish",
    "return",
    "reset",
    "reset-keeping-energy",
    "heal",
    "reboot",
]
ALL = ", ".join((*faults.FAULTS, *faults.NODE_FAULTS))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        *(({name: 1}, f"{name}: 1: it is either asked for with true or left out") for name in FLAGS),
        ({"reset": "yes"}, "reset: 'yes': it is either"),
        ({"vanish": False}, "vanish: False: it is either"),
        ({"xid": 0}, "xid: 0: from 1 to 999"),
        ({"xid": 1000}, "xid: 1000: from 1 to 999"),
        ({"xid": True}, "xid: True is not a whole number"),
        ({"xid": "79"}, "xid: '79' is not a whole number"),
        ({"temperature": 201}, "temperature: 201: from -40 to 200 °C"),
        ({"temperature": -41}, "temperature: -41: from -40 to 200 °C"),
        ({"temperature": 40.5}, "temperature: 40.5 is not a whole number"),
        ({"memory-temperature": 201}, "memory-temperature: 201: from -40 to 200 °C"),
        ({"margin": -201}, "margin: -201: from -200 to 200 °C"),
        ({"clocks-event-reasons": -1}, "clocks-event-reasons: -1: from 0 to 4294967295"),
        ({"ecc-uncorrected": 0}, "ecc-uncorrected: 0: from 1 to 1000000"),
        ({"energy-dip": 0}, "energy-dip: 0: from 1 to"),
        ({"persistence-mode": True}, "persistence-mode: True: one of on, off"),
        (
            {"recovery-action": "reset"},
            "recovery-action: 'reset': one of none, gpu-reset, node-reboot, drain-p2p, drain-and-r",
        ),
        ({"nvlink-down": 18}, "nvlink-down: 18: from 0 to 17"),
        ({"nvlink-up": -1}, "nvlink-up: -1: from 0 to 17"),
        ({"nvlink-errors": 0}, "nvlink-errors: 0: from 1 to"),
        ({"nvlink-crc-errors": 1.5}, "nvlink-crc-errors: 1.5 is not a whole number"),
        ({"fabric": "broken"}, "fabric: 'broken': one of completed, in-progress, unhealthy, limited"),
        ({"topology": ["unknown"]}, "topology: ['unknown']: one of readable, unreadable, unknown"),
        ({"pcie-width": 17}, "pcie-width: 17: from 1 to 16 lanes"),
        ({"pcie-width": 0}, "pcie-width: 0: from 1 to 16 lanes"),
        ({"pcie-replays": 0}, "pcie-replays: 0: from 1 to 1000000"),
        ({"pcie-fatal-errors": 0}, "pcie-fatal-errors: 0: from 1 to 1000000"),
        ({"event": 0x8}, "event: 0x8: 0x8 is an Xid: ask for xid"),
        ({"event": 0x80000 | 0x60}, "event: NVIDIA H100 80GB HBM3: the simulated one sends no events of type 0x80060"),
        ({"event": 0}, "event: 0: from 1 to 4294967295"),
        ({"error": 1000}, "error: 1000: from 0 to 999"),
        ({"error": True}, "error: True is not a whole number"),
        ({"return": True}, "return: GPU 0 has not vanished"),
        ({"hang": 0}, "hang: 0: from above 0 to 86400 seconds"),
        ({"hang": 86401}, "hang: 86401: from above 0 to 86400 seconds"),
        ({"hang": float("nan")}, "hang: nan: from above 0"),
        ({"hang": 10**400}, "hang: 1000"),
        ({"hang": "1"}, "hang: '1' is not a number of seconds"),
        ({"slow": 0}, "slow: 0: from above 0 to 86400 seconds"),
        ({"init-error": 0}, "init-error: 0: from 1 to 999"),
        ({"init-error": 999, "times": 0}, "times: 0: from 1 to 1000"),
        ({"lost": True, "times": 1}, "times: goes only with init-error, not with lost"),
        ({"lost": True, "instance": "1"}, "instance: goes only with xid, not with lost"),
        *(({"xid": 31, "instance": bad}, f"instance: {bad!r}: a GPU instance") for bad in ("1/0/0", "", "1/", "-1", 1)),
        ({"mig": ["3g.40gb"]}, "mig: ['3g.40gb'] is not a list of MIG profiles such as 3g.20gb,3g.20gb, nor"),
        ({"mig": True}, "mig: True is not a list of MIG profiles"),
        ({"mig": "3g.20gb"}, "mig: 3g.20gb: no such MIG profile; there are 1g.10gb, 1g.10gb+me, 1g.20gb, 2g."),
        ({"mig": "3g.40gb,"}, "mig: : no such MIG profile"),
        ({"mig": "none,3g.40gb"}, "mig: none: no such MIG profile"),
        ({"mig": "4g.40gb,4g.40gb"}, "mig: 4g.40gb: 2 of them: a GPU has room for 1"),
        ({"gpu": 9, "reboot": True}, "GPU 9: this node has GPUs 0 to 7"),
        ({"gpu": -1, "lost": True}, "GPU -1: this node has GPUs 0 to 7"),
        ({"gpu": "GPU-no", "lost": True}, "GPU GPU-no: no GPU of this node has this name; give an index from 0 to 7"),
        ({"gpu": None, "lost": True}, "gpu: missing: which GPU, by index or uuid"),
        ({"gpu": True, "lost": True}, "gpu: missing: which GPU, by index or uuid"),
        ({}, f"one fault at a time, of {ALL}: none given"),
        ({"reboot": True, "xid": 79}, f"one fault at a time, of {ALL}: xid and reboot given"),
        ({"melt": 1}, f"melt: no such fault; there are {ALL}"),
    ],
)
def test_a_value_that_cannot_be_is_refused_and_does_nothing(tmp_path, request_, sentence):
    bench = Bench(state=tmp_path)
    before = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(ConfigError) as caught:
        bench.apply(**request_)
    assert str(caught.value).startswith(sentence)
    assert (tmp_path / STATE_FILE).read_bytes() == before
    assert bench.heard() == []


def test_a_node_of_one_gpu_says_so():
    with pytest.raises(ConfigError, match="GPU 1: this node has only GPU 0"):
        faults.apply(make_node("h200"), {"gpu": 1, "lost": True})


T4, A100, H200, BARE = "t4-4", "dgx-a100", "h200", None


@pytest.mark.parametrize(
    ("model", "request_", "what"),
    [
        (T4, {"memory-temperature": 90}, "does not have the field for it, 82"),
        (A100, {"margin": 1}, "does not report a margin temperature"),
        (BARE, {"clocks-event-reasons": 1}, "does not report clocks event reasons"),
        (BARE, {"ecc-uncorrected": 1}, "does not count memory errors"),
        (T4, {"remap-pending": True}, "does not remap memory rows"),
        (T4, {"remap-failure": True}, "does not remap memory rows"),
        (H200, {"retired-pages": 1}, "does not retire memory pages"),
        (H200, {"retirement-pending": True}, "does not retire memory pages"),
        (T4, {"sram-threshold": True}, "does not report SRAM errors"),
        (A100, {"unrepairable-memory": True}, "does not report unrepairable memory"),
        (T4, {"recovery-action": "none"}, "does not have the field for it, 230"),
        (T4, {"nvlink-down": 0}, "has no NVLinks"),
        (H200, {"nvlink-up": 0}, "has no NVLinks"),
        (A100, {"nvlink-errors": 1}, "does not have the field for it, 214"),
        (T4, {"nvlink-crc-errors": 1}, "does not have the field for it, 38"),
        (A100, {"fabric": "unhealthy"}, "is part of no NVLink fabric"),
        (H200, {"fabric": "completed"}, "is part of no NVLink fabric"),
        (BARE, {"pcie-width": 8}, "does not report its PCIe link"),
        (BARE, {"pcie-replays": 1}, "does not report its PCIe link"),
        (T4, {"pcie-fatal-errors": 1}, "does not have the field for it, 180"),
        (T4, {"event": 0x8000}, "sends no events of type 0x8000"),
        (BARE, {"event": 0x2}, "sends no events of type 0x2"),
    ],
)
def test_what_a_part_does_not_have_cannot_fail(model, request_, what):
    node = make_node(model) if model else described()
    fine = node.condition(0)
    with pytest.raises(ConfigError) as caught:
        faults.apply(node, {"gpu": 0, **request_})
    (name,) = request_
    assert str(caught.value) == f"{name}: {node.profile.gpus[0].name}: the simulated one {what}"
    assert node.condition(0) == fine


def test_a_link_that_leads_nowhere_cannot_go_down():
    node = described(count=2, nvlink={"links": 2, "pairs": "0-1:1"})
    with pytest.raises(ConfigError, match=r"has nothing at the other end of its NVLink 1$"):
        faults.apply(node, {"gpu": 0, "nvlink-down": 1})


# Resets, and changes without a reset


def test_a_count_of_memory_errors_is_cleared_without_a_reset(bench):
    bench.apply(ecc_uncorrected=2)
    energy, binding = bench.driver.total_energy(bench.gpu), bench.node.bindings()
    assert "its count of memory errors is 0 again" in bench.apply(ecc_cleared=True)
    assert bench.driver.uncorrected_ecc_errors(bench.gpu) == 0
    assert bench.driver.total_energy(bench.gpu) >= energy
    assert bench.node.bindings() == binding


class Metered(Bench):
    """A GPU of 70 W on a clock of its own."""

    def __init__(self, state=None):
        self.now = 1_700_000_000.0
        self.state = state
        self.begin()

    def begin(self):
        """A process that opens the driver, as it finds the node."""
        super().__init__(state=self.state, wall_clock=lambda: self.now)

    def energy(self):
        told = self.driver.total_energy(self.gpu)
        assert self.driver.field_values(self.gpu, (Field(FI_TOTAL_ENERGY_CONSUMPTION),)) == (told,)
        return told

    def counters(self):
        by_field = self.driver.field_values(self.gpu, (Field(180), Field(38, 17), Field(94)))
        return (self.driver.uncorrected_ecc_errors(self.gpu), self.driver.pcie_replays(self.gpu), *by_field)


def test_energy_may_be_a_millijoule_less_once():
    metered = Metered()
    before = metered.energy()
    metered.apply(energy_dip=1)
    metered.now += 10
    assert metered.energy() == before - 1
    metered.now += 10
    assert abs(metered.energy() - (before - 1 + 700_000)) <= 1


def test_a_reset_may_leave_the_energy_as_it_is():
    metered = Metered()
    metered.apply(ecc_uncorrected=2)
    before = metered.energy()
    metered.now += 1
    assert "its energy counts on" in metered.apply(reset_keeping_energy=True)
    assert (metered.energy(), metered.counters()[0]) == (before + 70_000, 0)
    metered.apply(reset=True)
    assert metered.energy() == 0


@pytest.mark.parametrize("closed", [True, False])
def test_without_persistence_mode_counters_begin_anew_once_nobody_has_the_driver_open(tmp_path, closed):
    metered = Metered(tmp_path)
    for name in ("ecc_uncorrected", "pcie_replays", "pcie_fatal_errors", "nvlink_crc_errors"):
        metered.apply(**{name: 3})
    assert metered.counters() == (3, 3, 3, 3, 3)
    other = SimulatedDriver(metered.node)
    other.open()
    metered.driver.close()
    metered.driver.open()
    assert metered.counters() == (3, 3, 3, 3, 3), "kept, as it is built"
    metered.apply(persistence_mode="off")
    metered.driver.close()
    metered.driver.open()
    assert metered.counters() == (3, 3, 3, 3, 3), "another process has it open"
    other.close()
    before = metered.energy()
    if closed:
        metered.driver.close()
    metered.now += 5
    metered.begin()  # the next process, be it after an orderly end or not
    assert metered.counters() == (0, 0, 0, 0, 0)
    assert metered.energy() == 0 < before
    metered.apply(persistence_mode="on")
    metered.apply(ecc_uncorrected=3)
    metered.begin()
    assert metered.counters()[0] == 3


@pytest.mark.parametrize("befall", [SimulatedNode.lose, SimulatedNode.vanish])
def test_who_opens_the_driver_initialises_no_gpu_that_is_not_there(befall):
    node = make_node("hgx-h100")
    for gpu in range(2):
        node.change(gpu, persistence=False, pcie_replays=7)
    befall(node, 0)
    opened(node).close()
    assert [node.condition(gpu).pcie_replays for gpu in range(2)] == [7, 0]


def test_a_fault_waits_until_another_change_is_complete(bench):
    asking = threading.Thread(target=bench.apply, kwargs={"ecc-uncorrected": 3})
    with bench.node.changing(0) as now:
        asking.start()
        asking.join(0.02)
        assert (asking.is_alive(), now.ecc_uncorrected) == (True, 0)
    asking.join(5)
    assert now.ecc_uncorrected == 3
