"""`gpu-plugin simulate-allocation`: the choice, its runner-up, and requests that cannot be met."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from gpu_plugin import cli, control
from gpu_plugin.cli.topology_source import node_from
from gpu_plugin.placement.explain import explain
from gpu_plugin.placement.prepared import Placement
from gpu_plugin.placement.report import report
from gpu_plugin.placement.topology import Topology

DGX1 = "dgx1-v100"
NOWHERE = Path("/nonexistent")


@pytest.fixture
def run(capsys):
    """Runs the verb: its exit status, standard output and standard error."""

    def ran(*arguments):
        status = cli.main(["simulate-allocation", *map(str, arguments)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return ran


@pytest.fixture
def told(run):
    """What is told of a simulated node as JSON."""

    def ran(*arguments, simulate=DGX1):
        status, out, err = run("--simulate", simulate, "--json", *arguments)
        assert (status, err) == (0, "")
        return json.loads(out)

    return ran


@pytest.fixture(scope="module")
def topology():
    return Topology.of(node_from(DGX1, NOWHERE))


def test_the_text_says_what_was_chosen_and_over_what(run, topology):
    status, out, err = run("--simulate", DGX1, "--available", "1-3,5", "--size", 2)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "choice     GPUs 2-3, score 250",
        "how        exactly: the best of 6 sets",
        "runner-up  GPUs 1-2, score 230",
        "why        its pairs score 250 in all, 20 more than the runner-up's",
        "",
        f"GPU 2  {topology.uuids[2]}",
        f"GPU 3  {topology.uuids[3]}",
        "",
        "2-3  NV2  250",
    ]


@pytest.mark.parametrize(
    ("must", "size"), [(must, size) for must in ((), (5,), (0, 6)) for size in range(len(must) or 1, 9)]
)
def test_json_is_what_placement_says(told, topology, must, size):
    answer = told("--size", size, *(("--must", ",".join(map(str, must))) if must else ()))
    expected = explain(Placement.of(topology), range(8), must, size)
    assert set(answer) == {"size", "available", "must", "choice", "runner_up", "why"}
    assert (answer["size"], answer["available"], answer["must"]) == (size, list(range(8)), list(must))
    assert answer["choice"] == {
        "gpus": list(expected.choice.gpus),
        "uuids": [topology.uuids[at] for at in expected.choice.gpus],
        "score": expected.choice.score,
        "exact": True,
        "how": expected.choice.why,
    }
    assert answer["choice"]["score"] == sum(topology.scores[a][b] for a, b in combinations(answer["choice"]["gpus"], 2))
    assert (answer["runner_up"] is None) == (expected.runner_up is None)
    if expected.runner_up is not None:
        assert answer["runner_up"]["gpus"] == list(expected.runner_up.gpus)
        assert answer["runner_up"]["score"] <= answer["choice"]["score"]
    assert answer["why"] == expected.why


def test_gpus_are_named_by_index_range_uuid_and_how_a_uuid_begins(told, topology):
    first, second = topology.uuids[3], topology.uuids[6][:9]
    answer = told("--available", f"0,{first},{second}", "--available", " 4-5 ,0", "--size", 2, "--must", second.upper())
    assert answer["available"] == [0, 3, 4, 5, 6]
    assert answer["must"] == [6]
    assert 6 in answer["choice"]["gpus"]


def test_all_is_all(told):
    assert told("--available", "all", "--size", 3) == told("--size", 3)


def test_one_gpu_has_no_pairs_and_no_score_to_show(run):
    lines = run("--simulate", DGX1, "--available", "6", "--size", 1)[1].splitlines()
    assert lines[0] == "choice     GPU 6"
    assert lines[2] == "runner-up  none"
    assert len(lines) == 6


def test_more_than_sixteen_gpus_are_a_bounded_search_that_says_so(run, told, tmp_path):
    file = tmp_path / "large.yaml"
    file.write_text("count: 20\ngpu: {name: Own, numa_node: 0}\nnvlink: {links: 2, pairs: '3-17:2'}\n")
    answer = told("--size", 2, simulate=file)
    assert (answer["choice"]["gpus"], answer["choice"]["exact"]) == ([3, 17], False)
    assert answer["runner_up"] is None
    assert "20 GPUs are more than 16" in answer["choice"]["how"]
    assert "how        not exactly: a bounded search" in run("--simulate", file, "--size", 2)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "0"], "--size: 0: a container asks for at least one"),
        (["--size", "-1"], "--size: -1: a container asks for at least one"),
        (["--size", "9"], "--size: 9 GPUs are asked for, and 8 are available"),
        (["--size", "2", "--available", "3"], "--size: 2 GPUs are asked for, and 1 is available"),
        (["--size", "2", "--available", "0-2", "--must", "3,1"], "--must: not among the available GPUs: 3"),
        (["--size", "1", "--must", "0,1"], "--must: 2 GPUs must be had, and --size asks for 1"),
        (
            ["--size", "1", "--must", "8"],
            "--must: 8: no GPU of this node has this index; there are those of index 0, 1,",
        ),
        (["--size", "1", "--available", "6-9"], "--available: 8: no GPU of this node has this index"),
        (["--size", "1", "--available", "0-99999"], "--available: 8: no GPU of this node has this index"),
        (["--size", "1", "--available", "3-1"], "--available: 3-1: a range begins with the lower index"),
        (["--size", "1", "--available", "GPU-zz"], "--available: GPU-zz: no GPU of this node has this uuid"),
        (["--size", "1", "--must", "GPU-"], "and 6 more: say which by its uuid"),
        (["--size", "1", "--available", "0:2"], "--available: 0:2: no GPU of this node has this uuid"),
        (["--size", "1", "--policy", "packed"], "--policy goes with --replicas"),
        (["--size", "1", "--replicas", "4", "--policy", "pack"], "--policy: 'pack' is none of distributed, packed"),
        (["--size", "1", "--replicas", "4", "--available", "0:5"], "--available: GPU 0 has 4 replicas, 5 are given"),
        (
            ["--size", "9", "--replicas", "4", "--available", "0-1"],
            "--size: 9 replicas are asked for, and 8 are available",
        ),
        (
            ["--size", "3", "--replicas", "4", "--available", "0:1", "--must", "0:2"],
            "--must: 2 replicas of GPU 0, of which 1 are available",
        ),
        (["--size", "1", "--replicas", "4", "--must", "0:2"], "--must: 2 replicas must be had, and --size asks for 1"),
        ([], "Missing option '--size'"),
    ],
)
def test_what_cannot_be_had_is_one_sentence_and_bad_usage(run, arguments, words):
    status, out, err = run("--simulate", DGX1, *arguments)
    assert (status, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("gpu-plugin simulate-allocation: ")
    assert words in line


def test_indices_are_the_drivers_and_not_places_in_a_list(run, monkeypatch):
    reply = json.loads(json.dumps(report(node_from(DGX1, NOWHERE))))
    for gpu in reply["gpus"]:
        gpu["index"] += 2
    monkeypatch.setattr(control, "request", lambda *_: reply)
    status, out, _ = run("--state-dir", "/state", "--available", "3-5,7", "--size", 2, "--json")
    answer = json.loads(out)
    assert (status, answer["available"], answer["choice"]["gpus"]) == (0, [3, 4, 5, 7], [4, 5])
    status, _, err = run("--state-dir", "/state", "--size", 1, "--must", "0")
    assert (status, "--must: 0: no GPU of this node has this index" in err) == (2, True)


def test_two_gpus_of_one_index_are_named_by_their_uuids(run, monkeypatch):
    reply = json.loads(json.dumps(report(node_from("t4-4", NOWHERE))))
    reply["gpus"][1]["index"] = 0
    monkeypatch.setattr(control, "request", lambda *_: reply)
    status, _, err = run("--state-dir", "/state", "--size", 1, "--must", "0")
    assert status == 2
    assert f"{reply['gpus'][0]['uuid']} and {reply['gpus'][1]['uuid']}: say which by its uuid" in err
    assert run("--state-dir", "/state", "--size", 1, "--must", reply["gpus"][1]["uuid"])[0] == 0


def test_without_a_daemon_a_simulated_node_is_offered(run, tmp_path):
    status, out, err = run("--state-dir", tmp_path, "--size", 2)
    assert (status, out) == (1, "")
    assert "(or name a simulated node with --simulate)" in err


class TestSharedGpus:
    def taken(self, answer):
        return {each["gpu"]: each["count"] for each in answer["choice"]["gpus"]}

    def test_two_replicas_of_idle_gpus_are_two_linked_gpus(self, told, topology):
        answer = told("--replicas", 4, "--size", 2)
        assert self.taken(answer) == {2: 1, 3: 1}
        assert answer["choice"]["score"] == topology.scores[2][3]
        assert (answer["policy"], answer["replicas"]) == ("distributed", 4)
        assert [one.partition("::")[0] for one in answer["choice"]["ids"]] == [topology.uuids[2], topology.uuids[3]]

    @pytest.mark.parametrize(("policy", "gpu"), [("distributed", 1), ("packed", 0), ("spread", 1)])
    def test_the_policy_says_which_gpu_one_replica_comes_from(self, told, policy, gpu):
        answer = told("--replicas", 4, "--policy", policy, "--available", "0:1,1:4", "--size", 1)
        assert self.taken(answer) == {gpu: 1}
        assert answer["available"] == [{"gpu": 0, "free": 1}, {"gpu": 1, "free": 4}]

    def test_what_must_be_had_is(self, told):
        answer = told("--replicas", 4, "--available", "0-1:2,5", "--must", "5:2,0", "--size", 3)
        assert self.taken(answer) == {0: 1, 5: 2}
        assert answer["must"] == [{"gpu": 0, "count": 1}, {"gpu": 5, "count": 2}]

    def test_the_text(self, run, topology):
        out = run("--simulate", DGX1, "--replicas", 4, "--available", "0:3,1:1", "--size", 3)[1]
        assert out.splitlines() == [
            "choice  GPUs 0-1, score 150",
            "policy  distributed",
            "",
            f"GPU 0  {topology.uuids[0]}  2 of its 3 free replicas",
            f"GPU 1  {topology.uuids[1]}  1 of its 1 free replicas",
            "",
            "0-1  NV1  150",
        ]
