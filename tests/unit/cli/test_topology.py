"""`gpu-plugin topology`: of simulated nodes, and of a daemon's."""

import json
import stat
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gpu_plugin import cli
from gpu_plugin.cli.topology_source import simulated_node
from gpu_plugin.devices.device import Resource, mig_device, whole_gpu, with_reason
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views.report import offered, report
from gpu_plugin.runtime import control
from gpu_plugin.simulation import profile

MATRICES = Path(__file__).parents[1] / "placement" / "recorded"
SAME = {"a100-mig-mixed": "dgx-a100", "h100-mig-single": "hgx-h100"}
RECORDED = [name for name in profile.names() if (MATRICES / f"{SAME.get(name, name)}.txt").exists()]


def served(node, unfit=(), left=()):
    """A daemon's report that hands out all GPUs as whole ones, but for unfit ones (reasons by index) and those left out."""
    devices = (whole_gpu(gpu) for gpu in node.gpus if gpu.index not in left)
    fit = tuple(with_reason(device, dict(unfit).get(int(device.index), "")) for device in devices)
    return report(node, [offered(Resource("nvidia.com/gpu", fit), "distributed")])


@pytest.fixture
def run(capsys):
    """Runs the verb: its exit status, standard output and standard error."""

    def ran(*arguments):
        status = cli.main(["topology", *map(str, arguments)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return ran


@pytest.mark.parametrize("name", RECORDED)
def test_the_matrix_is_what_nvidia_smi_shows_of_such_a_machine(run, name):
    lines = (MATRICES / f"{SAME.get(name, name)}.txt").read_text().splitlines()
    recorded = [line.split() for line in lines if line and not line.startswith("#")]
    shown = [line.split() for line in run("--simulate", name)[1].split("\n\n")[0].splitlines()]
    assert shown[0] == [*recorded[0], "Affinity"]
    assert shown[1:] == recorded[1:]


@pytest.mark.parametrize("name", profile.names())
def test_json_has_every_pair_once_and_placements_own_score(run, name):
    status, out, err = run("--simulate", name, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert set(told) == {"gpus", "links"}
    topology = Topology.of(simulated_node(name))
    assert [(gpu["index"], gpu["uuid"], gpu["numa"]) for gpu in told["gpus"]] == [
        (at, uuid, topology.numa[at]) for at, uuid in enumerate(topology.uuids)
    ]
    assert all(set(gpu) == {"index", "uuid", "numa"} for gpu in told["gpus"])
    assert [(link["a"], link["b"]) for link in told["links"]] == list(combinations(range(len(topology)), 2))
    for link in told["links"]:
        assert set(link) == {"a", "b", "nvlinks", "pcie", "score"}
        assert link["pcie"] in ("PIX", "PXB", "PHB", "NODE", "SYS")
        assert link["score"] == topology.scores[link["a"]][link["b"]] == topology.scores[link["b"]][link["a"]]
        assert (link["score"] >= 100) == (link["nvlinks"] > 0)


def test_json_has_the_pcie_relation_under_the_nvlinks(run):
    links = json.loads(run("--simulate", "dgx1-v100", "--json")[1])["links"]
    found = {(link["a"], link["b"]): (link["nvlinks"], link["pcie"], link["score"]) for link in links}
    assert found[0, 1] == (1, "PIX", 150)
    assert found[0, 3] == (2, "PHB", 230)
    assert found[0, 4] == (2, "SYS", 210)
    assert found[0, 7] == (0, "SYS", 10)


def test_an_unknown_numa_node_is_null(run):
    assert json.loads(run("--simulate", "h200", "--json")[1]) == {
        "gpus": [{"index": 0, "uuid": "GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189", "numa": None}],
        "links": [],
    }


def test_scores_take_the_place_of_words(run):
    status, out, _ = run("--simulate", "l40s-pcie-8", "--scores")
    assert status == 0
    assert out.splitlines()[1] == "GPU0   X    50    20    20    10    10    10    10    0"


@pytest.mark.parametrize("name", profile.names())
def test_the_picture_has_every_gpu_and_every_nvlink_pair(run, tmp_path, name):
    file = tmp_path / "node.svg"
    status, out, err = run("--simulate", name, "--svg", file)
    assert (status, out, err) == (0, run("--simulate", name)[1], f"{file}: written\n")
    root = ET.fromstring(file.read_text())
    node = simulated_node(name)
    assert sum(each.get("class") == "gpu" for each in root.iter()) == len(node.gpus)
    direct = [link for link in node.links.values() if link.nvlinks and not link.switched]
    assert sum(each.get("class") == "nvlink" for each in root.iter()) == len(direct)
    reached = {uuid for pair, link in node.links.items() if link.switched and link.nvlinks for uuid in pair}
    assert sum(each.get("class") == "switched" for each in root.iter()) == len(reached)
    assert run("--simulate", name, "--svg", "-") == (0, file.read_text(), "")


def test_the_picture_replaces_a_file_whole_and_everybody_may_read_it(run, tmp_path):
    file, link = tmp_path / "node.svg", tmp_path / "link.svg"
    file.write_text("old " * 10000)
    file.chmod(0o600)
    link.symlink_to(file)
    assert run("--simulate", "t4-4", "--svg", link)[0] == 0
    assert ET.fromstring(file.read_text()).tag.endswith("svg")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.svg", "node.svg"]


def test_json_and_a_picture_go_together(run, tmp_path):
    status, out, _ = run("--simulate", "t4-4", "--json", "--svg", tmp_path / "node.svg")
    assert (status, len(json.loads(out)["gpus"])) == (0, 4)
    assert (tmp_path / "node.svg").exists()


def test_a_file_that_cannot_be_written_is_a_sentence_and_leaves_nothing(run, tmp_path):
    status, out, err = run("--simulate", "t4-4", "--svg", tmp_path / "none" / "node.svg")
    assert (status, out) == (1, "")
    assert err == f"gpu-plugin: --svg: {tmp_path}/none/node.svg cannot be written: No such file or directory\n"
    status, _, err = run("--simulate", "t4-4", "--svg", tmp_path)
    assert status == 1
    assert "it exists and is not a regular file; name another one, or - for standard output" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--simulate", "dgx1-v10"], "no simulated node is called 'dgx1-v10'. Did you mean dgx1-v100?"),
        (["--simulate", "/no/such.yaml"], "--simulate: /no/such.yaml: No such file or directory"),
        (["--simulate", "t4-4", "--svg", "-", "--json"], "--svg - writes to standard output"),
        (["--simulate", "t4-4", "--svg", "-", "--scores"], "--svg - writes to standard output"),
        (["--simulate", "t4-4", "--svg", ""], "--svg: name the file, or - for standard output"),
        (["--simulate", "t4-4", "--scores", "--json"], "--json has the scores"),
    ],
)
def test_bad_usage_is_one_line(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("gpu-plugin topology: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_profile_of_ones_own(run, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("count: 2\ngpu: {name: Own}\nnvlink: {links: 2, pairs: '0-1:2'}\n")
    assert "NVLink: GPUs 0-1: NV2 each" in run("--simulate", file)[1]


class TestRunningDaemon:
    @pytest.fixture
    def answer(self, monkeypatch):
        """Has a daemon answer so."""

        def answers(reply):
            def request(state_dir, verb, **fields):
                assert (str(state_dir), verb, fields) == ("/state", "topology", {})
                if isinstance(reply, Exception):
                    raise reply
                return json.loads(json.dumps(reply))

            monkeypatch.setattr(control, "request", request)

        return answers

    @pytest.mark.parametrize("name", profile.names())
    @pytest.mark.parametrize("how", [(), ("--json",), ("--scores",)])
    def test_what_it_knows_is_shown_as_of_a_simulated_node(self, run, answer, name, how):
        answer(served(simulated_node(name)))
        assert run("--state-dir", "/state", *how) == run("--simulate", name, *how)

    def test_one_that_answers_otherwise_is_of_another_version(self, run, answer):
        answer({"gpus": [{"index": 0}]})
        status, out, err = run("--state-dir", "/state")
        assert (status, out) == (3, "")
        assert "the running daemon is of another version: this is not a report of a topology" in err

    def test_what_is_not_handed_out_is_named_and_marked(self, run, answer, tmp_path):
        plain = run("--simulate", "dgx1-v100")[1]
        answer(served(simulated_node("dgx1-v100"), unfit={2: "cordoned", 4: "cordoned", 5: "Xid 79"}, left=(7,)))
        status, out, _ = run("--state-dir", "/state", "--svg", tmp_path / "node.svg")
        last = "Held back from pods: GPUs 2,4 (cordoned), GPU 5 (Xid 79), GPU 7 (not among the GPUs that are served)\n"
        assert (status, out) == (0, plain + last)
        assert run("--state-dir", "/state", "--json") == run("--simulate", "dgx1-v100", "--json")
        assert run("--state-dir", "/state", "--scores") == run("--simulate", "dgx1-v100", "--scores")
        root = ET.fromstring((tmp_path / "node.svg").read_text())
        fills = {each.get("data-gpu"): each.get("fill") for each in root.iter() if each.get("class") == "gpu"}
        assert {gpu for gpu, fill in fills.items() if fill != fills["0"]} == {"2", "4", "5", "7"}
        struck = [each for each in root.iter() if each.get("class") == "held"]
        assert len(struck) == 4
        titles = ["".join(each.itertext()) for each in struck]
        assert any(title.endswith("held back from pods: Xid 79") for title in titles)
        assert "held back from pods" in "".join(root.itertext())
        assert "held back from pods" not in run("--simulate", "dgx1-v100", "--svg", "-")[1]

    def test_a_sick_mig_device_is_named_and_its_gpu_is_not_marked(self, run, answer, tmp_path):
        node = simulated_node("a100-mig-mixed")
        cut = next(gpu for gpu in node.gpus if gpu.mig_devices)
        slices = [mig_device(cut, mig) for mig in cut.mig_devices]
        sick = (with_reason(slices[0], "Xid 94"), *slices[1:])
        whole = tuple(whole_gpu(gpu) for gpu in node.gpus if gpu is not cut)
        answer(
            report(
                node,
                [
                    offered(Resource("nvidia.com/gpu", whole), "packed"),
                    offered(Resource("nvidia.com/mig", sick), "packed"),
                ],
            )
        )
        out = run("--state-dir", "/state", "--svg", tmp_path / "node.svg")[1]
        assert out.endswith(f"\nHeld back from pods: MIG device {slices[0].index} (Xid 94)\n")
        assert 'class="held"' not in (tmp_path / "node.svg").read_text()

    def test_one_that_knows_no_gpu_yet_says_so(self, run, answer):
        answer({"gpus": [], "links": [], "resources": []})
        status, _, err = run("--state-dir", "/state")
        assert (status, err) == (1, "gpu-plugin: the running daemon knows no GPU of this node yet: its log says why\n")

    def test_without_one_a_simulated_node_is_offered(self, run, tmp_path):
        status, out, err = run("--state-dir", tmp_path)
        assert (status, out) == (3, "")
        assert f"no daemon answers at {tmp_path}/control.sock" in err
        assert "(or name a simulated node with --simulate)" in err
