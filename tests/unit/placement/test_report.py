"""What a daemon tells of its topology reaches a command whole."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from gpu_plugin.devices.node import Node
from gpu_plugin.placement.groups import LinkGroups
from gpu_plugin.placement.report import report, reported
from gpu_plugin.placement.topology import Topology
from tests.unit.placement.nodes import dgx1, random_nodes


@given(random_nodes())
def test_nothing_that_placement_looks_at_is_lost(made):
    made = Node(
        tuple(replace(gpu, architecture=9) for gpu in made.gpus), made.links, cliques={made.gpus[-1].uuid: "a.1"}
    )
    told = reported(json.loads(json.dumps(report(made))))
    assert Topology.of(told) == Topology.of(made)
    assert LinkGroups.of(told) == LinkGroups.of(made)


def test_gpus_come_by_index_and_every_pair_once():
    made = dgx1()
    told = json.loads(json.dumps(report(Node(tuple(reversed(made.gpus)), made.links))))
    assert [gpu["index"] for gpu in told["gpus"]] == list(range(8))
    pairs = [(link["a"], link["b"]) for link in told["links"]]
    assert len(pairs) == len(set(pairs)) == 28
    assert all(a < b for a, b in pairs)


def test_a_node_of_64_gpus_fits_a_reply():
    gpus = tuple(
        replace(dgx1().gpus[0], uuid=f"GPU-{at:036}", index=at, model="NVIDIA H100 80GB HBM3") for at in range(64)
    )
    assert len(json.dumps(report(Node(gpus)))) < 400_000  # a reply may have 1 MiB


def test_a_later_version_may_say_more():
    told = json.loads(json.dumps(report(dgx1())))
    for each in (*told["gpus"], *told["links"], told):
        each["colour"] = "green"
    assert Topology.of(reported(told)) == Topology.of(dgx1())


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"gpus": []},
        {"gpus": [{"index": 0}], "links": []},
        {"gpus": [], "links": [{"a": 0, "b": 1}]},
        {"gpus": None, "links": None},
        {"gpus": [7], "links": []},
    ],
)
def test_what_is_no_report_is_said_to_be_none(reply):
    with pytest.raises(ValueError, match="this is no report of a topology"):
        reported(reply)
