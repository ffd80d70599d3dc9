import time

import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.nvml.port import NvmlError, Return
from gpu_plugin.simulation import faults, profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode


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
    assert said == f"GPU 3 ({node.profile.gpus[3].uuid}): Xid 79 raised."
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
    assert not node.is_lost(0)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"gpu": 9, "lost": True}, "GPU 9: this node has GPUs 0 to 7"),
        ({"gpu": -1, "lost": True}, "GPU -1: this node has GPUs 0 to 7"),
        ({"gpu": "GPU-no", "lost": True}, "GPU GPU-no: this node has no such uuid; say an index from 0 to 7"),
        ({"lost": True}, "gpu: missing: which GPU, by index or uuid"),
        ({"gpu": True, "lost": True}, "gpu: missing: which GPU, by index or uuid"),
        ({"gpu": 0}, "one fault at a time, of xid, temperature, lost, hang, heal: none given"),
        (
            {"gpu": 0, "lost": True, "xid": 79},
            "one fault at a time, of xid, temperature, lost, hang, heal: xid and lost",
        ),
        ({"gpu": 0, "melt": 1}, "melt: no such fault; there are xid, temperature, lost, hang, heal"),
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
        ({"gpu": 0, "lost": False}, "lost: False: it is either asked for with true or left out"),
        ({"gpu": 0, "heal": 1}, "heal: 1: it is either asked for with true or left out"),
    ],
)
def test_what_cannot_be_is_refused_and_does_nothing(node, driver, request_, sentence):
    with pytest.raises(ConfigError) as caught:
        faults.apply(node, request_)
    assert str(caught.value).startswith(sentence)
    assert [driver.temperature(driver.handle_by_index(index)) for index in range(8)] == [32] * 8


def test_a_node_of_one_gpu_says_so():
    with pytest.raises(ConfigError, match="GPU 1: this node has only GPU 0"):
        faults.apply(SimulatedNode(profile.load("h200")), {"gpu": 1, "lost": True})


async def test_as_a_verb(node):
    fault = faults.verb(node)
    before = time.monotonic()
    reply = await fault({"gpu": 3, "heal": True})
    assert reply["done"] == f"GPU 3 ({node.profile.gpus[3].uuid}): repaired and reset."
    assert before <= float(str(reply["at"])) <= time.monotonic()
    with pytest.raises(ConfigError, match="GPU 9"):
        await fault({"gpu": 9, "heal": True})
