import time

import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml.port import Event, NvmlError
from gpu_plugin.simulation import faults, profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode

ALL = ", ".join((*faults.FAULTS, *faults.NODE_FAULTS))


@pytest.fixture
def node():
    return SimulatedNode(profile.load("hgx-h100"))


@pytest.fixture
def driver(node):
    driver = SimulatedDriver(node)
    driver.open()
    return driver


def test_xid(node, driver):
    events = driver.event_set()
    driver.register_events(driver.handle_by_index(3), 8, events)
    said = faults.apply(node, {"gpu": 3, "xid": 79})
    assert said == f"GPU 3 (0000:61:00.0, {node.profile.gpus[3].uuid}): Xid 79 raised."
    assert driver.wait(events, 0).data == 79
    assert faults.apply(node, {"gpu": 2, "xid": 31}).endswith("Xid 31 raised, and nothing listens for its events.")


def test_temperature(node, driver):
    said = faults.apply(node, {"gpu": 3, "temperature": 92})
    assert said.endswith(": now at 92 °C, until healed.")
    assert driver.temperature(driver.handle_by_index(3)) == 92


def test_lost_and_healed_by_uuid(node, driver):
    uuid = node.profile.gpus[3].uuid
    assert faults.apply(node, {"gpu": uuid, "lost": True}).endswith(": fell off the bus, until healed.")
    with pytest.raises(NvmlError) as caught:
        driver.handle_by_index(3)
    assert caught.value.code == Return.GPU_IS_LOST
    assert faults.apply(node, {"gpu": uuid, "heal": True}).endswith(": repaired and reset.")
    assert driver.handle_by_index(3)


def test_hang():
    now = [0.0]
    node = SimulatedNode(profile.load("h200"), clock=lambda: now[0])
    assert faults.apply(node, {"gpu": 0, "hang": 2.5}).endswith(": every driver call hangs for 2.5 s.")
    now[0] = 2.5
    assert node.failing(0) is None


def test_slow_looks(node, driver):
    gpu = driver.handle_by_index(3)
    assert faults.apply(node, {"gpu": 3, "slow": 0.02}).endswith(": every driver call takes 0.02 s, until healed.")
    begun = time.perf_counter()
    driver.uuid(gpu)
    assert time.perf_counter() - begun > 0.015
    faults.apply(node, {"gpu": 3, "reset": True})
    assert node.condition(3).slow == 0.02
    faults.apply(node, {"gpu": 3, "heal": True})
    assert node.condition(3).slow is None


@pytest.mark.parametrize(("times", "often"), [(1, "once"), (2, "2 times"), (None, "until the daemon ends")])
def test_a_driver_that_refuses_to_be_opened(node, driver, times, often):
    driver.close()
    request = {"init-error": 999} | ({} if times is None else {"times": times})
    assert faults.apply(node, request) == f"The node: its driver refuses to be opened with 999, {often}."
    for _ in range(times or 5):
        with pytest.raises(NvmlError) as caught:
            driver.open()
        assert caught.value.code == Return.UNKNOWN
    if times is not None:
        driver.open()
        assert driver.device_count() == 8


def sizes(driver, gpu):
    found: list[str] = []
    while len(found) < driver.max_mig_devices(gpu):
        try:
            handle = driver.mig_handle(gpu, len(found))
        except NvmlError:
            break
        found.append(driver.name(handle).rpartition(" ")[2])
    return found


def test_mig(node, driver):
    gpu, events = driver.handle_by_index(3), driver.event_set()
    driver.register_events(gpu, EventType.MIG_CONFIG_CHANGE, events)
    said = faults.apply(node, {"gpu": 3, "mig": " 3g.40gb, 1c.3g.40gb "})
    assert said.endswith(": in MIG mode, partitioned into 3g.40gb, 1c.3g.40gb.")
    assert (driver.mig_mode(gpu), sizes(driver, gpu)) == ((1, 1), ["3g.40gb", "1c.3g.40gb"])
    assert driver.wait(events, 0) == Event(gpu, EventType.MIG_CONFIG_CHANGE, 0)
    for nothing in ("", "empty", " empty "):
        assert faults.apply(node, {"gpu": 3, "mig": nothing}).endswith(": in MIG mode, partitioned into nothing.")
        assert (driver.mig_mode(gpu), sizes(driver, gpu)) == ((1, 1), [])
        assert driver.wait(events, 0).kind == EventType.MIG_CONFIG_CHANGE
    assert faults.apply(node, {"gpu": 3, "mig": "none"}).endswith(": out of MIG mode.")
    assert (driver.mig_mode(gpu), sizes(driver, gpu)) == ((0, 0), [])
    assert driver.wait(events, 0).data == 0


def test_mig_of_a_gpu_that_is_lost_or_hangs(node, driver):
    gpu = driver.handle_by_index(3)
    node.lose(3)
    node.hang(3, 3600)
    faults.apply(node, {"gpu": 3, "mig": "7g.80gb"})
    faults.apply(node, {"gpu": 3, "heal": True})
    assert sizes(driver, gpu) == ["7g.80gb"]


@pytest.mark.parametrize("name", ["l40s-pcie-8", "dgx1-v100", "t4-4"])
def test_mig_of_a_part_without_it(name):
    node = SimulatedNode(profile.load(name))
    with pytest.raises(ConfigError) as caught:
        faults.apply(node, {"gpu": 0, "mig": "none"})
    assert str(caught.value) == f"mig: {node.profile.gpus[0].name}: the simulated node knows of no MIG profiles for it"


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"gpu": 9, "lost": True}, "GPU 9: this node has GPUs 0 to 7"),
        ({"gpu": -1, "lost": True}, "GPU -1: this node has GPUs 0 to 7"),
        ({"gpu": "GPU-no", "lost": True}, "GPU GPU-no: no GPU of this node has this name; give an index from 0 to 7"),
        ({"lost": True}, "gpu: missing: which GPU, by index or uuid"),
        ({"gpu": True, "lost": True}, "gpu: missing: which GPU, by index or uuid"),
        ({"gpu": 0}, f"one fault at a time, of {ALL}: none given"),
        ({"gpu": 0, "lost": True, "xid": 79}, f"one fault at a time, of {ALL}: xid and lost given"),
        ({"gpu": 0, "reboot": True, "xid": 79}, f"one fault at a time, of {ALL}: xid and reboot given"),
        ({"gpu": 0, "melt": 1}, f"melt: no such fault; there are {ALL}"),
        ({"gpu": 0, "xid": 0}, "xid: 0: from 1 to 999"),
        ({"gpu": 0, "xid": 1000}, "xid: 1000: from 1 to 999"),
        ({"gpu": 0, "xid": True}, "xid: True is not a whole number"),
        ({"gpu": 0, "xid": "79"}, "xid: '79' is not a whole number"),
        ({"gpu": 0, "temperature": 201}, "temperature: 201: from -40 to 200 °C"),
        ({"gpu": 0, "temperature": -41}, "temperature: -41: from -40 to 200 °C"),
        ({"gpu": 0, "temperature": 40.5}, "temperature: 40.5 is not a whole number"),
        ({"gpu": 0, "hang": 0}, "hang: 0: from above 0 to 86400 seconds"),
        ({"gpu": 0, "hang": -1.0}, "hang: -1.0: from above 0 to 86400 seconds"),
        ({"gpu": 0, "hang": 86401}, "hang: 86401: from above 0 to 86400 seconds"),
        ({"gpu": 0, "hang": float("nan")}, "hang: nan: from above 0"),
        ({"gpu": 0, "hang": float("inf")}, "hang: inf: from above 0"),
        ({"gpu": 0, "hang": 10**400}, "hang: 1000"),
        ({"gpu": 0, "hang": "1"}, "hang: '1' is not a number of seconds"),
        ({"gpu": 0, "slow": 0}, "slow: 0: from above 0 to 86400 seconds"),
        ({"init-error": 0}, "init-error: 0: from 1 to 999"),
        ({"init-error": 999, "times": 0}, "times: 0: from 1 to 1000"),
        ({"gpu": 0, "lost": True, "times": 1}, "times: goes only with init-error, not with lost"),
        ({"gpu": 0, "energy-dip": 0}, "energy-dip: 0: from 1 to"),
        ({"gpu": 0, "persistence-mode": True}, "persistence-mode: True: one of on, off"),
        ({"gpu": 0, "ecc-cleared": 1}, "ecc-cleared: 1: it is either asked for with true or left out"),
        (
            {"gpu": 0, "reset-keeping-energy": 1},
            "reset-keeping-energy: 1: it is either asked for with true or left out",
        ),
        ({"gpu": 0, "mig": ["3g.40gb"]}, "mig: ['3g.40gb'] is not a list of MIG profiles such as 3g.20gb,3g.20gb, nor"),
        ({"gpu": 0, "mig": True}, "mig: True is not a list of MIG profiles"),
        (
            {"gpu": 0, "mig": "3g.20gb"},
            "mig: 3g.20gb: no such MIG profile; there are 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.",
        ),
        ({"gpu": 0, "mig": "3g.40gb,"}, "mig: : no such MIG profile"),
        ({"gpu": 0, "mig": "none,3g.40gb"}, "mig: none: no such MIG profile"),
        ({"gpu": 0, "mig": "4g.40gb,4g.40gb"}, "mig: 4g.40gb: 2 of them: a GPU has room for 1"),
        ({"gpu": 0, "lost": False}, "lost: False: it is either asked for with true or left out"),
        ({"gpu": 0, "heal": 1}, "heal: 1: it is either asked for with true or left out"),
    ],
)
def test_what_cannot_be_is_refused_and_does_nothing(node, driver, request_, sentence):
    with pytest.raises(ConfigError) as caught:
        faults.apply(node, request_)
    assert str(caught.value).startswith(sentence)
    assert [driver.temperature(driver.handle_by_index(index)) for index in range(8)] == [32] * 8
    assert [driver.mig_mode(driver.handle_by_index(index)) for index in range(8)] == [(0, 0)] * 8


def test_a_node_of_one_gpu_says_so():
    with pytest.raises(ConfigError, match="GPU 1: this node has only GPU 0"):
        faults.apply(SimulatedNode(profile.load("h200")), {"gpu": 1, "lost": True})


async def test_as_a_verb(node):
    fault = faults.verb(node)
    before = time.monotonic()
    reply = await fault({"gpu": 3, "heal": True})
    assert reply["done"] == f"GPU 3 (0000:61:00.0, {node.profile.gpus[3].uuid}): repaired and reset."
    assert before <= float(str(reply["at"])) <= time.monotonic()
    with pytest.raises(ConfigError, match="GPU 9"):
        await fault({"gpu": 9, "heal": True})
