"""`gpu-plugin simulate-allocation`: the choice, its runner-up, and requests that cannot be met."""

import json
import re
import shlex
from itertools import combinations

import pytest
from msgspec.structs import replace

from gpu_plugin import cli
from gpu_plugin.cli.topology_source import simulated_node
from gpu_plugin.config.choices import ALLOCATION_POLICIES
from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import Device, Resource, mig_device, whole_gpu, with_reason, withhold
from gpu_plugin.devices.sharing import Named, share
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.shared import POLICIES
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views import explain
from gpu_plugin.placement.views.report import offered, report
from gpu_plugin.placement.whole import Trace, choose
from gpu_plugin.runtime import control

DGX1 = "dgx1-v100"
GPUS, MIGS = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"
FIRST = "GPU-ab959b99-e74c-57b5-a4f0-0eadac7c8028"


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
    """Run the verb on a simulated node, and return its JSON."""

    def ran(*arguments, simulate=DGX1):
        status, out, err = run("--simulate", simulate, "--json", *arguments)
        assert (status, err) == (0, "")
        return json.loads(out)

    return ran


@pytest.fixture(scope="module")
def topology():
    return Topology.of(simulated_node(DGX1))


@pytest.mark.parametrize(
    ("must", "size"), [(must, size) for must in ((), (5,), (0, 6)) for size in range(len(must) or 1, 9)]
)
def test_json_is_what_placement_says(told, topology, must, size):
    answer = told("--size", size, *(("--must", ",".join(map(str, must))) if must else ()))
    trace = Trace()
    expected = choose(Placement.of(topology), range(8), must, size, trace=trace)
    assert set(answer) == {"size", "available", "must", "choice", "runner_up", "why"}
    assert (answer["size"], answer["available"], answer["must"]) == (size, list(range(8)), list(must))
    assert answer["choice"] == {
        "gpus": list(expected.gpus),
        "uuids": [topology.uuids[at] for at in expected.gpus],
        "score": topology.score(expected.gpus),
        "exact": True,
        "how": explain.how(trace),
    }
    assert answer["choice"]["score"] == sum(topology.scores[a][b] for a, b in combinations(answer["choice"]["gpus"], 2))
    assert (answer["runner_up"] is None) == (trace.runner_up is None)
    if trace.runner_up is not None:
        assert set(answer["runner_up"]) == {"gpus", "uuids", "score"}
        assert answer["runner_up"]["gpus"] == list(trace.runner_up)
        assert answer["runner_up"]["score"] <= answer["choice"]["score"]
    assert answer["why"] == explain.why(trace)


def test_gpus_are_named_by_index_range_uuid_and_how_a_uuid_begins(told, topology):
    first, second = topology.uuids[3], topology.uuids[6][:9]
    answer = told("--available", f"0,{first},{second}", "--available", " 4-5 ,0", "--size", 2, "--must", second.upper())
    assert answer["available"] == [0, 3, 4, 5, 6]
    assert answer["must"] == [6]
    assert 6 in answer["choice"]["gpus"]


def test_all_is_all(told):
    assert told("--available", "all", "--size", 3) == told("--size", 3)


def test_what_is_taken_is_the_opposite_of_what_is_available(told):
    assert told("--taken", "1-3,5", "--size", 2) == told("--available", "0,4,6-7", "--size", 2)
    counted = told("--replicas", 4, "--taken", "0:3,1,2:1", "--size", 2)
    assert counted == told("--replicas", 4, "--available", "0:1,2:3,3-7", "--size", 2)
    assert counted["available_counts"] == {"0": 1, "2": 3, "3": 4, "4": 4, "5": 4, "6": 4, "7": 4}


def test_the_policies_in_the_help_are_those_there_are(run):
    assert POLICIES.keys() == ALLOCATION_POLICIES.keys()
    assert f"[{'|'.join(ALLOCATION_POLICIES)}]" in run("--help")[1]


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
    assert (
        "how        not exact: a bounded search, since 20 GPUs are more than 16\n"
        in run("--simulate", file, "--size", 2)[1]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--size 0", "--size: 0: a container asks for at least one device"),
        ("--size 9", "--size: 9 GPUs are asked for, and 8 are available"),
        ("--size 1 --available ''", "--size: 1 GPU is asked for, and 0 are available"),
        ("--size 2 --available 0-2 --must 3,1", "--must: not available: GPU 3"),
        ("--size 1 --must 0,1", "--must: 2 GPUs are required, and --size asks for 1"),
        ("--size 1 --must 8", "--must: 8: nothing there has this index; this node has GPUs 0-7"),
        ("--size 1 --available 0-99999999", "--available: 8: nothing there has this index"),
        ("--size 1 --available 3-1", "--available: 3-1: a range begins with the lower index"),
        ("--size 1 --available GPU-zz", "--available: GPU-zz: nothing there has this uuid; this node has GPUs 0-7"),
        (
            "--size 1 --available 1-3-5",
            "--available: 1-3-5: neither an index, a range, a uuid nor a PCI bus id; this node has GPUs 0-7",
        ),
        (
            "--size 1 --must 0000:ff:00.0",
            "--must: 0000:ff:00.0: nothing there has this PCI bus id; this node has GPUs 0-7",
        ),
        ("--size 1 --must a", "--must: GPU a: it could be GPU 0 (0000:06:00.0, "),
        ("--size 1 --must GPU-", "and 6 more: give its uuid"),
        ("--size 1 --available 0:2", "--available: 0:2: counts go with replicas, and GPU 0 is given out once"),
        (f"--size 1 --must {FIRST}::1", f"{FIRST}::1: GPU 0 is given out once, so its only id is {FIRST}"),
        ("--size 1 --available 0 --taken 1", "--taken: this option already determines the free devices: leave out"),
        ("--size 1 --policy packed", "--policy goes with --replicas"),
        ("--size 1 --resource nvidia.com/gpu", "--resource: a simulated node serves no resource"),
        ("--size 1 --replicas 4 --policy pack", "--policy: 'pack' is unknown; there are distributed, packed"),
        ("--size 1 --replicas 4 --available 0:5", "0:5: GPU 0 has 4 replicas"),
        ("--size 1 --replicas 4 --available 0-2:2,1:3", "GPU 1 is given twice, as 2 and as 3: give it once"),
        ("--size 1 --replicas 4 --available 0:2,0", "GPU 0 is given twice, as 2 and without a number: give it once"),
        (
            f"--size 1 --replicas 4 --available 0,{FIRST}::1",
            "GPU 0 is given twice, by its ids and otherwise: give it once",
        ),
        (f"--size 1 --replicas 4 --must {FIRST}::4", "::4: GPU 0 has 4 replicas, numbered from 0"),
        ("--size 1 --replicas 4 --must GPU-ab95::1", f"::1: an id has the whole uuid, {FIRST}"),
        (
            f"--size 1 --replicas 4 --available {FIRST}::1 --must {FIRST}::2",
            f"--must: not all of {FIRST}::2 are available",
        ),
        ("--size 9 --replicas 4 --available 0-1", "--size: 9 replicas are asked for, and 8 are available"),
        ("--size 3 --replicas 4 --available 0:1 --must 0:2", "--must: 2 replicas of GPU 0, of which 1 is available"),
        ("--size 1 --replicas 4 --must 0:2", "--must: 2 replicas are required, and --size asks for 1"),
        ("", "Missing option '--size'"),
    ],
)
def test_what_cannot_be_had_is_one_sentence_and_bad_usage(run, arguments, words):
    status, out, err = run("--simulate", DGX1, *shlex.split(arguments))
    assert (status, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("gpu-plugin simulate-allocation: ")
    assert words in line


def test_without_a_daemon_a_simulated_node_is_offered(run, tmp_path):
    status, out, err = run("--state-dir", tmp_path, "--size", 2)
    assert (status, out) == (3, "")
    assert "(or name a simulated node with --simulate)" in err


@pytest.mark.parametrize(
    "name", ["2", "GPU-a42adbb5", "gpu-a42a", "a42a", "00000000:0A:00.0", "0000:0a:00.0", "0a:00.0", "0a:00"]
)
def test_a_gpu_is_named_as_everywhere(told, name):
    answer = told("--size", "1", "--available", f"1,{name}", "--must", name)
    assert (answer["available"], answer["must"]) == ([1, 2], [2])


def test_replicas_are_counted_of_a_gpu_by_its_bus_id_too(told):
    answer = told("--size", "1", "--replicas", "4", "--available", "0000:0a:00.0:3,a1a4:2")
    assert answer["available_counts"] == {"1": 2, "2": 3}


class TestSharedGpus:
    def test_two_replicas_of_idle_gpus_are_two_linked_gpus(self, told, topology):
        answer = told("--replicas", 4, "--size", 2, "--available", "0-3")
        assert answer["choice"]["counts"] == {"2": 1, "3": 1}
        assert answer["choice"]["gpus"] == [2, 3]
        assert answer["choice"]["score"] == topology.scores[2][3]
        assert answer["choice"]["uuids"] == [topology.uuids[2], topology.uuids[3]]
        assert (answer["policy"], answer["replicas"], answer["runner_up"]) == ("distributed", 4, None)
        assert [one.partition("::")[0] for one in answer["choice"]["ids"]] == [topology.uuids[2], topology.uuids[3]]
        assert set(told("--size", 2)) | {"policy", "replicas", "available_counts", "must_counts"} == set(answer)

    @pytest.mark.parametrize(("policy", "gpu"), [("distributed", 1), ("packed", 0), ("spread", 1)])
    def test_the_policy_says_which_gpu_one_replica_comes_from(self, told, policy, gpu):
        answer = told("--replicas", 4, "--policy", policy, "--available", "0:1,1:4", "--size", 1)
        assert answer["choice"]["counts"] == {str(gpu): 1}
        assert (answer["available"], answer["available_counts"]) == ([0, 1], {"0": 1, "1": 4})

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9])
    def test_on_an_idle_node_a_policy_gives_the_best_linked_gpus_of_the_fewest_or_of_the_most(self, told, size):
        def given(policy, size):
            return told("--replicas", 4, "--policy", policy, "--size", size)["choice"]["gpus"]

        assert given("distributed", size) == given("spread", size) == told("--size", min(size, 8))["choice"]["gpus"]
        assert given("packed", size) == told("--size", -(-size // 4))["choice"]["gpus"]

    def test_what_must_be_had_is(self, told):
        answer = told("--replicas", 4, "--available", "0-1:2,5", "--must", "5:2,0", "--size", 3)
        assert answer["choice"]["counts"] == {"0": 1, "5": 2}
        assert (answer["must"], answer["must_counts"]) == ([0, 5], {"0": 1, "5": 2})

    def test_what_is_named_again_counts_once(self, told):
        once = told("--replicas", 4, "--must", "0", "--size", 2)
        assert once["must_counts"] == {"0": 1}
        for again in (["--must", "0"], ["--must", FIRST], ["--must", "0-0"]):
            assert told("--replicas", 4, "--must", "0", *again, "--size", 2) == once
        assert told("--must", "0,0", "--must", "0", "--size", 2)["must"] == [0]

    def test_ids_are_taken_as_the_daemon_tells_them(self, told):
        answer = told(
            "--replicas", 4, "--available", f"{FIRST}::0,{FIRST}::2,1:2", "--must", f"{FIRST}::2", "--size", 2
        )
        assert answer["available_counts"] == {"0": 2, "1": 2}
        assert answer["must_counts"] == {"0": 1}
        assert answer["choice"]["ids"][0] == f"{FIRST}::2"
        assert answer["choice"]["counts"] == {"0": 1, "1": 1}


class TestRunningDaemon:
    @pytest.fixture
    def serves(self, monkeypatch):
        """Make a daemon report these resources: devices by name, and a policy."""

        def has(node, policy="distributed", **resources):
            views = [(Resource(name, tuple(devices)), policy) for name, devices in resources.items()]
            told = json.loads(json.dumps(report(node, [offered(*view) for view in views])))
            monkeypatch.setattr(control, "request", lambda *_: told)
            return told

        return has

    @pytest.fixture
    def ask(self, run):
        return lambda *arguments: run("--state-dir", "/state", *arguments)

    @pytest.fixture
    def asked(self, ask):
        def ran(*arguments):
            status, out, err = ask("--json", *arguments)
            assert (status, err) == (0, "")
            return json.loads(out)

        return ran

    def test_only_what_is_handed_out_is_chosen_and_the_rest_is_told(self, serves, ask, asked):
        node = simulated_node(DGX1)
        reasons = {2: "cordoned", 3: "Xid 79", 4: "cordoned"}
        devices = [with_reason(whole_gpu(gpu), reasons.get(gpu.index, "")) for gpu in node.gpus if gpu.index != 7]
        serves(node, **{GPUS: devices})
        status, out, _ = ask("--size", 2)
        assert (status, out.splitlines()[:2]) == (0, ["choice     GPUs 5-6  score 230", f"resource   {GPUS}"])
        left = "GPUs 2,4 (cordoned), GPU 3 (Xid 79), GPU 7 (not among the GPUs that are served)"
        assert f"left out   {left}" in out.splitlines()
        answer = asked("--size", 2)
        assert (answer["resource"], answer["available"]) == (GPUS, [0, 1, 5, 6])
        assert [(each["index"], each["reason"]) for each in answer["left_out"]][:2] == [(2, "cordoned"), (3, "Xid 79")]
        assert f"5 GPUs are asked for, and 4 are available; left out: {left}" in ask("--size", 5)[2]
        assert asked("--size", 2, "--taken", "5")["available"] == [0, 1, 6]
        missing = "--must: not available: GPU 0, GPU 3 (Xid 79)\n"
        assert ask("--size", 2, "--taken", "0", "--must", "0,3")[2].endswith(missing)

    def test_what_is_unfit_may_be_named_which_is_noted(self, serves, ask, asked):
        node = simulated_node(DGX1)
        devices = [with_reason(whole_gpu(gpu), "cordoned" if gpu.index in (2, 3, 4) else "") for gpu in node.gpus[:7]]
        serves(node, **{GPUS: devices})
        status, out, _ = ask("--size", 2, "--available", "0-3")
        assert (status, out.splitlines()[0]) == (0, "choice     GPUs 2-3  score 250")
        assert "note       the kubelet would not offer GPUs 2-3 (cordoned)" in out.splitlines()
        assert "left out" not in out
        assert "note" not in ask("--size", 2, "--available", "0-1")[1]
        for given, left, kept in (("0-3", [], [2, 3]), ("0-1", [], []), ("", [2, 3, 4, 7], [])):
            answer = asked("--size", 2, *(["--available", given] if given else []))
            assert [each["index"] for each in answer["left_out"]] == left
            assert [each["index"] for each in answer["not_offered"]] == kept
        assert asked("--size", 2, "--taken", "0,3")["available"] == [1, 5, 6]
        status, _, err = ask("--size", 2, "--available", "5-7")
        assert (status, f"--available: 7: nothing there has this index; {GPUS} has GPUs 0-6\n" in err) == (2, True)

    def test_sharing_and_policy_are_the_daemons(self, serves, ask, asked):
        node = simulated_node(DGX1)
        devices = replicas(node, 4)
        serves(node, "packed", **{GPUS: devices})
        answer = asked("--size", 1, "--taken", "6:3,1:2")
        assert (answer["policy"], answer["replicas"], answer["choice"]["counts"]) == ("packed", 4, {"6": 1})
        last = f"{node.gpus[6].uuid}::3"  # the first ones are given out first
        assert asked("--size", 1, "--taken", "6:3")["choice"]["ids"] == [last]
        assert asked("--size", 1, "--available", "6:1")["choice"]["ids"] == [last]
        assert asked("--size", 1, "--taken", "6:3", "--policy", "spread")["choice"]["counts"] != {"6": 1}
        assert asked("--size", 1, "--replicas", "2")["available_counts"]["0"] == 2
        assert "GPU 6  " + node.gpus[6].uuid + "  1 of 1 free replica\n" in ask("--size", 1, "--taken", "6:3")[1]

    def test_the_daemon_gives_the_same_ids(self, serves, asked):
        node = simulated_node(DGX1)
        devices = [
            with_reason(device, "cordoned" if device.index == "3" else "")
            for device in (*replicas(node, 3, last=5), *map(whole_gpu, node.gpus[5:]))
        ]
        pool = [device.id for device in devices if not device.reason][2:-1]
        order = {device.id: at for at, device in enumerate(devices)}
        placement = Placement.of(Topology.of(node))
        for policy in POLICIES:
            serves(node, policy, **{GPUS: devices})
            assert "replicas" not in asked("--size", 1)  # five are shared, three are not
            for size in range(1, len(pool) + 1):
                answer = asked("--size", size, "--available", ",".join(reversed(pool)), "--must", pool[1])
                assert tuple(answer["choice"]["ids"]) == preferred(
                    pool, pool[1:2], size, devices, order, placement, policy
                )

    def test_mig_devices_are_named_by_index_and_uuid(self, serves, ask, asked):
        node = simulated_node("a100-mig-mixed")
        slices = [mig_device(gpu, mig) for gpu in node.gpus for mig in gpu.mig_devices if mig.profile == "1g.5gb"]
        whole = [whole_gpu(gpu) for gpu in node.gpus if not gpu.mig_enabled]
        sick = with_reason(slices[2], "Xid 94")
        serves(node, **{GPUS: whole, MIGS: [*slices[:2], sick, *slices[3:]]})
        index = [device.index for device in slices]
        answer = asked("--resource", MIGS, "--size", 1, "--taken", index[0])
        assert answer["available"] == [index[1], *index[3:]]
        assert [each["index"] for each in answer["left_out"]] == [index[2]]
        answer = asked("--resource", MIGS, "--size", 1, "--available", f"{slices[0].id},{slices[1].id[:12]}")
        assert answer["available"] == index[:2]
        assert answer["choice"]["ids"][0] in (slices[0].id, slices[1].id)
        assert answer["choice"]["gpus"] == [int(index[0].split(":")[0])]
        first, last = index[1].split(":")[0], index[3].split(":")[1]
        assert asked("--resource", MIGS, "--size", 1, "--available", f"{index[1]}-{last}")["available"] == index[1:4]
        missing = f"--available: {first}:9: nothing there has this index"
        assert missing in ask("--resource", MIGS, "--size", 1, "--available", f"{first}:9-12")[2]
        gpu = index[0].partition(":")[0]
        bus_id = next(each.pci_bus_id for each in node.gpus if str(each.index) == gpu)
        for name in (gpu, bus_id):
            assert set(asked("--resource", MIGS, "--size", 1, "--available", name)["available"]) == {
                one for one in index if one.startswith(f"{gpu}:")
            }
        out = ask("--resource", MIGS, "--size", 1)[1]
        assert f"left out   MIG device {index[2]} (Xid 94)" in out
        assert re.search(rf"^MIG device ({'|'.join(index)})  MIG-[0-9a-f-]+$", out, re.MULTILINE)
        assert "counted as nvidia.com/mig-1g.5gb" in ask("--size", 1)[1]
        there = f"{index[0]}-{index[-2].split(':')[1]},{index[-1]}\n"
        status, _, err = ask("--resource", MIGS, "--size", 1, "--must", "0:5")
        assert (status, f"--must: 0:5: nothing there has this index; {MIGS} has MIG devices {there}" in err) == (
            2,
            True,
        )

    def test_which_resource_it_is(self, serves, ask, asked):
        node = simulated_node("t4-4")
        one, other = [[whole_gpu(gpu)] for gpu in node.gpus[:2]]
        serves(node, **{"example.com/a": one})
        assert asked("--size", 1)["resource"] == "example.com/a"
        serves(node, **{"example.com/a": one, "example.com/b": other})
        assert "--resource: name one of example.com/a, example.com/b" in ask("--size", 1)[2]
        assert asked("--size", 1, "--resource", "example.com/b")["choice"]["gpus"] == [1]
        serves(node, **{"example.com/a": one, GPUS: other})
        assert asked("--size", 1)["resource"] == GPUS
        for name in ("example.com/c", ""):
            said = f"--resource: {name!r} is not served here: example.com/a, {GPUS} are"
            assert said in ask("--size", 1, "--resource", name)[2]

    def test_one_that_does_not_say_what_it_serves_is_told_so(self, serves, ask, monkeypatch):
        told = serves(simulated_node("t4-4"))
        status, _, err = ask("--size", 1)
        assert (status, "the running daemon serves no resource of this node yet: its log says why" in err) == (1, True)
        del told["resources"]
        status, out, err = ask("--size", 1)
        assert (status, out) == (3, "")
        assert "the running daemon is of another version: this is not a report" in err

    def test_what_is_gone_from_the_node_cannot_be_chosen(self, serves, ask):
        node = simulated_node("t4-4")
        lost = withhold(Device("GPU-lost", "GPU-lost", "GPU-lost", "4"), "it is not on this node any more")
        serves(node, **{GPUS: [*map(whole_gpu, node.gpus), lost]})
        assert "left out   GPU 4 (it is not on this node any more)" in ask("--size", 2)[1]
        status, _, err = ask("--size", 2, "--available", "0,4")
        assert (status, "GPU 4 is not on this node: it is not on this node any more" in err) == (2, True)

    def test_indices_are_the_drivers_and_not_places_in_a_list(self, serves, ask, asked):
        node = simulated_node(DGX1)
        moved = replace(node, gpus=tuple(replace(gpu, index=gpu.index + 2) for gpu in node.gpus))
        serves(moved, **{GPUS: map(whole_gpu, moved.gpus)})
        answer = asked("--available", "3-5,7", "--size", 2)
        assert (answer["available"], answer["choice"]["gpus"]) == ([3, 4, 5, 7], [4, 5])
        status, _, err = ask("--size", 1, "--must", "0")
        assert (status, "--must: 0: nothing there has this index" in err) == (2, True)

    def test_two_gpus_of_one_index_are_named_by_their_uuids(self, serves, ask):
        node = simulated_node("t4-4")
        node = replace(node, gpus=(node.gpus[0], replace(node.gpus[1], index=0), *node.gpus[2:]))
        serves(node, **{GPUS: map(whole_gpu, node.gpus)})
        status, _, err = ask("--size", 1, "--must", "0")
        assert status == 2
        assert f"{node.gpus[0].uuid} and {node.gpus[1].uuid}: give its uuid" in err
        assert ask("--size", 1, "--must", node.gpus[1].uuid)[0] == 0


def replicas(node, count, last=8):
    """The first GPUs of a node, with `count` replicas each, as the daemon has them."""
    named = [Named(GPUS, whole_gpu(gpu), ()) for gpu in node.gpus[:last]]
    return share({GPUS: named}, [SharedResource(GPUS, GPUS, count)])[0][GPUS]
