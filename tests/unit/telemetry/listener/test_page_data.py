"""The content of the status page as data."""

import json

import pytest
from gpu_plugin.telemetry.listener.page_data import EVENTS, HOLDERS, awaiting, drawn, links, page_data

from tests.unit.cli.test_status import STATUS, gpu
from tests.unit.telemetry.listener.page_material import GPU, READINGS, crowded, hardware, holder, material, topology


def test_who_is_hit_by_what_and_what_to_do():
    data = page_data(material())
    assert (data["verdict"], data["headline"]) == ("unhealthy", "1 of 2 GPUs is Unhealthy")
    assert data["complaints"] == [{"severity": "unhealthy", "text": "GPU 1 is Unhealthy", "gpu": "GPU-1"}]
    sick = data["gpus"][1]
    [told] = sick["signals"]
    assert (told["detail"], told["since"], told["action"]) == ("Xid 79", 3600.0, "drain the node and reboot it")
    assert sick["devices"][0]["holders"] == [
        {"namespace": "team-a", "pod": "train-1", "container": "main", "devices": 1},
    ]
    assert [(row["pod"], row["gpus"], row["state"]) for row in data["pods"]["containers"]] == [
        ("train-1", [{"index": 1, "state": "unhealthy"}], "unhealthy"),
        ("train-0", [{"index": 0, "state": "healthy"}], "healthy"),
    ]


def test_a_node_where_all_is_well():
    status = {**STATUS, "health": {**STATUS["health"], "gpus": [gpu(0), gpu(1)]}}
    data = page_data(material(status=status, explained=[]))
    assert (data["verdict"], data["headline"], data["complaints"]) == ("ok", "All 2 GPUs are Healthy", [])


def test_what_is_wrong_with_the_node_comes_first_and_then_the_worst_gpu():
    gpus = [
        gpu(0, "degraded", "DEGRADED", "NVLink 5 is down"),
        gpu(1),
        gpu(2, withheld=["its MPS daemon is down"]),
        gpu(3, "unhealthy"),
    ]
    status = {**STATUS, "health": {**STATUS["health"], "gpus": gpus}}
    data = page_data(material(status=status, troubles=("configuration: no such key",)))
    assert [(each["severity"], each["text"]) for each in data["complaints"]] == [
        ("unhealthy", "configuration: no such key"),
        ("unhealthy", "GPU 3 is Unhealthy"),
        ("attention", "GPU 0 is Healthy, degraded"),
        ("attention", "GPU 2 is withheld"),
    ]
    assert data["headline"] == "configuration: no such key; 1 of 4 GPUs is Unhealthy; 1 degraded; 1 withheld"


def test_the_headline_never_reassures_where_no_pod_gets_a_gpu():
    away = "nvidia.com/gpu is not registered: waiting for the kubelet"
    told = {**STATUS, "health": {**STATUS["health"], "gpus": [gpu(0), gpu(1)]}}
    assert page_data(material(status=told, troubles=(away,)))["headline"] == away
    kept = {**STATUS, "health": {**STATUS["health"], "gpus": [gpu(0, withheld=["its MPS daemon is down"])]}}
    told_of = page_data(material(status=kept))
    assert (told_of["verdict"], told_of["headline"]) == ("attention", "1 of 1 GPU withheld")
    several = page_data(material(status=told, troubles=(away, "a", "b")))
    assert several["headline"] == f"{away}; 2 other things need attention"


def test_replicas_count_for_their_gpu_and_a_container_with_several_is_named_once():
    pieces = [hardware(0, 28), hardware(1, 4)]
    held = {(GPU, f"GPU-0::{at}"): frozenset({holder("train-0")}) for at in range(3)}
    held[GPU, "GPU-0::3"] = frozenset({holder("other", "init"), holder("other")})
    data = page_data(material(topology=topology(2, pieces), held=held))
    first, second = data["gpus"]
    assert (first["listed"], first["held"], second["held"]) == (28, 5, 0)
    assert first["devices"][0]["holders"] == [
        {"namespace": "team-a", "pod": "other", "container": "init", "devices": 1},
        {"namespace": "team-a", "pod": "other", "container": "main", "devices": 1},
        {"namespace": "team-a", "pod": "train-0", "container": "main", "devices": 3},
    ]
    assert data["resources"][0]["held"] == 5


def test_mig_devices_are_of_their_gpu():
    pieces = [
        hardware(0, visible_id="MIG-a", index="0:0", kind="mig"),
        hardware(0, visible_id="MIG-b", index="0:1", kind="mig", healthy=0, reason="Xid 63"),
    ]
    data = page_data(material(topology=topology(2, pieces), held={(GPU, "MIG-b"): frozenset({holder("train-0")})}))
    assert [(each["id"], each["held"]) for each in data["gpus"][0]["devices"]] == [("MIG-a", 0), ("MIG-b", 1)]
    assert data["gpus"][1]["devices"] == []


def test_that_holders_are_not_known_is_told_with_the_reason():
    data = page_data(material(held=None, why_unknown="no socket at /pod-resources"))
    assert data["pods"] == {"known": False, "why": "no socket at /pod-resources", "containers": [], "left_out": 0}
    assert data["gpus"][0]["held"] is None
    assert data["resources"][0]["held"] is None


def test_what_is_shown_is_bounded():
    held = {(GPU, f"GPU-0::{at}"): frozenset({holder(f"p{at:04}")}) for at in range(500)}
    events = [{"at": float(at), "kind": "daemon", "text": str(at)} for at in range(200)]
    data = page_data(material(topology=topology(2, [hardware(0, 500)]), held=held, events=events))
    device = data["gpus"][0]["devices"][0]
    assert (len(device["holders"]), device["left_out"], device["held"]) == (HOLDERS, 500 - HOLDERS, 500)
    assert [event["text"] for event in data["events"][:2]] == ["199", "198"]
    assert len(data["events"]) == EVENTS


@pytest.mark.parametrize("reading", [None, float("nan"), float("inf"), "61", True])
def test_a_reading_that_is_no_number_is_not_known(reading):
    status = {
        **STATUS,
        "health": {**STATUS["health"], "gpus": [gpu(0, readings={**READINGS, "temperature_celsius": reading})]},
    }
    data = page_data(material(status=status))
    assert data["gpus"][0]["readings"]["temperature_celsius"] is None
    json.dumps(data, allow_nan=False)


def test_a_daemon_of_which_less_is_known_is_shown_as_well():
    bare = {key: value for key, value in gpu(0).items() if key != "readings"}
    data = page_data(
        material(status={**STATUS, "health": {**STATUS["health"], "gpus": [bare]}}, explained=[], topology={})
    )
    assert data["gpus"][0]["devices"] == []
    assert set(data["gpus"][0]["readings"].values()) == {None}
    nobody = page_data(material(status={**STATUS, "health": {**STATUS["health"], "gpus": []}}))
    assert (nobody["verdict"], nobody["headline"]) == ("attention", "No GPU is known")
    assert [each["text"] for each in nobody["complaints"]] == ["No GPU is known"]
    away = material(status={**STATUS, "health": {**STATUS["health"], "gpus": []}}, troubles=("the driver hangs",))
    assert page_data(away)["headline"] == "the driver hangs; No GPU is known"
    waiting = page_data(material(status={**STATUS, "waiting": "another"}))
    assert waiting["headline"] == "Another daemon has this node"


def test_before_there_is_a_daemon_the_same_keys_are_there():
    early = awaiting("waiting for the node's label")
    assert early.keys() == page_data(material()).keys()
    assert early["complaints"][0]["text"] == "waiting for the node's label"


def test_the_same_facts_are_the_same_data():
    assert page_data(crowded()) == page_data(crowded())


def test_links_are_told_in_words_a_table_and_a_picture():
    report = topology(2, [hardware(0), hardware(1, healthy=0, reason="Xid 79")])
    told = links(report)
    assert told is not None
    assert (told["gpus"], told["rows"]) == ([0, 1], [["X", "NV4"], ["NV4", "X"]])
    assert "NVLink: GPUs 0-1: NV4 each" in told["words"]
    assert set(told["legend"]) == {"X", "NV#"}
    picture = drawn(report, "node-1")
    assert 'class="held"' in picture  # GPU 1 is struck through
    assert links(topology(1, [])) is None
