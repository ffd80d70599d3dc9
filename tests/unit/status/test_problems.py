"""The problems of a node: their severity, order, cause and remedy; and its headline."""

import pytest
from msgspec.structs import replace

from gpu_plugin.health.explain import Explanation, Remedy
from gpu_plugin.health.latch import RESET
from gpu_plugin.health.notices import Notice
from gpu_plugin.status import model
from gpu_plugin.status.model import SEVERITIES, Gpu, Status
from gpu_plugin.status.problems import headline, problems
from gpu_plugin.status.remedies import REMEDIES, Shell, of

SHELL = Shell("node-1", "gpu", "gpu-plugin-x7")
OUTSIDE = Shell()
REGISTERED = model.Resource(devices=1, healthy=1, registration=model.Registration(registered=True))
AWAY = replace(REGISTERED, registration=model.Registration(why="no kubelet"))
WELL = Status(
    daemon=model.Process(version="1"),
    kubelet=model.Kubelet(socket="/k"),
    resources={"r": REGISTERED},
    configuration=model.Configuration(since=1.0),
    gpus=(Gpu(index=0, uuid="GPU-0"),),
)
XID = Explanation(name="xid", detail="Xid 79", verdict="FATAL", since=5.0, remedy=Remedy.REBOOT, xid=79, recovers="x")
LOST = replace(XID, name="lost", detail="the GPU is lost", since=4.0, xid=None)
SICK = Gpu(index=1, uuid="GPU-1", state="unhealthy", healthy=False, verdict="FATAL", signals=(XID,), holders=("d/a",))


def found(**changed) -> list[tuple[str, str, str]]:
    return [(each.kind, each.severity, each.object) for each in problems(replace(WELL, **changed), SHELL)]


def with_signals(*signals: Explanation, **changed) -> Status:
    return replace(WELL, gpus=(replace(SICK, signals=signals, **changed),))


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, []),
        ({"waiting": "another daemon has the node"}, [("waiting", "critical", "node")]),
        (
            {"configuration": model.Configuration(file="/f", since=1.0, refused="x")},
            [("configuration", "warning", "/f")],
        ),
        (
            {"configuration": model.Configuration(since=1.0, wanted="/w", refused="x", faults=("a", "b"))},
            [("configuration", "warning", "/w")],
        ),
        ({"configuration": model.Configuration(since=1.0, unheard="403")}, [("label", "warning", "node")]),
        ({"resources": {"r": AWAY}}, [("not-registered", "critical", "r")]),
        ({"resources": {"r": AWAY}, "kubelet": model.Kubelet()}, []),  # nothing is registered
        ({"cdi": model.Cdi(directory="/c", trouble="no space")}, [("cdi", "critical", "/c")]),
        ({"cdi": model.Cdi(directory="/c")}, []),
        ({"cdi": model.Cdi(directory="/c", complaints=("/x is left out",))}, [("cdi-file", "note", "/c")]),
        ({"labels": model.Labels(way="file", trouble="/f: no such directory")}, [("labels", "warning", "labels")]),
        ({"cluster": model.Cluster(trouble=("403",))}, [("cluster", "warning", "cluster")]),
        ({"driver": model.Driver(trouble="not loaded")}, [("driver", "critical", "driver")]),
        ({"driver": model.Driver(answered=False)}, [("driver-silent", "critical", "driver")]),
        ({"driver": model.Driver(restart="restart it")}, [("restart", "critical", "driver")]),
        ({"driver": model.Driver(no_gpu="no GPU on its bus"), "gpus": ()}, [("no-gpu", "note", "driver")]),
        ({"state": model.State(directory="/state", trouble="no space")}, [("state", "critical", "/state")]),
        ({"missing": (model.Missing(name="GPU 1b", why="away"),)}, [("missing-gpu", "critical", "GPU 1b")]),
        ({"unoffered": ("GPU 0 has MIG devices",)}, [("unoffered", "warning", "configuration")]),
        ({"gpus": (SICK,)}, [("gpu-xid", "critical", "GPU 1")]),
        (
            {"gpus": (replace(SICK, state="degraded", healthy=True, signals=(replace(XID, verdict="DEGRADED"),)),)},
            [("gpu-xid", "note", "GPU 1")],
        ),
        (
            {
                "gpus": (
                    replace(SICK, state="held-back", held_back=("cordon",), signals=(replace(XID, name="cordon"),)),
                )
            },
            [("gpu-cordon", "note", "GPU 1")],
        ),
        (
            {"gpus": (Gpu(index=2, uuid="GPU-2", state="withheld", withheld=("down",)),)},
            [("withheld", "warning", "GPU 2")],
        ),
    ],
)
def test_each_trouble_is_a_problem_with_its_severity_and_object(changed, wanted):
    assert found(**changed) == wanted


def test_a_lost_gpu_comes_before_a_refused_configuration_and_the_headline_names_both():
    refused = model.Configuration(file="/f", since=1.0, refused="line 3: a very long sentence about a key")
    status = replace(WELL, gpus=(SICK,), configuration=refused)
    some = problems(status, SHELL)
    assert [each.kind for each in some] == ["gpu-xid", "configuration"]
    words = headline(status, some)
    assert words.startswith(some[0].title)
    assert some[1].title in words
    assert "very long" not in words


def test_one_outage_of_the_kubelet_is_one_problem():
    (problem,) = problems(replace(WELL, resources={f"mig-{at}": AWAY for at in range(6)}), SHELL)
    assert problem.cause == "no kubelet"
    assert all(f"mig-{at}" in problem.object for at in range(6))


def test_signals_of_one_remedy_are_one_problem_with_all_causes_and_the_pods():
    (problem,) = problems(with_signals(XID, LOST), SHELL)
    assert "Xid 79" in problem.cause
    assert "the GPU is lost" in problem.cause
    assert (problem.since, problem.pods, problem.gpu) == (4.0, ("d/a",), "GPU-1")
    both = problems(with_signals(XID, replace(LOST, remedy=Remedy.NONE)), SHELL)
    assert [each.kind for each in both] == ["gpu-xid", "gpu-lost"]


def test_an_applications_error_is_no_problem():
    assert problems(with_signals(replace(XID, verdict="APP"), state="healthy", healthy=True), SHELL) == ()


def test_a_fault_of_a_mig_device_names_the_device():
    (problem,) = problems(with_signals(replace(XID, device="MIG-7"), state="degraded", healthy=True), SHELL)
    assert (problem.severity, "MIG-7" in problem.object, "MIG-7" in problem.title) == ("critical", True, True)


def test_a_cause_that_withholds_several_gpus_is_one_problem_with_its_own_remedy():
    why = "gpu-plugin mps does not run on this node; to do: start gpu-plugin mps"
    some = tuple(Gpu(index=at, uuid=f"GPU-{at}", state="withheld", withheld=(why,)) for at in range(4))
    (problem,) = problems(replace(WELL, gpus=some), SHELL)
    assert problem.cause == "gpu-plugin mps does not run on this node"
    assert problem.withholds == ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    assert [step.text for step in problem.steps] == ["Start gpu-plugin mps"]


def test_a_resource_without_a_healthy_device_is_a_problem_unless_its_gpus_or_the_driver_explain_it():
    unfit = replace(REGISTERED, healthy=0, reasons=("the kubelet may hold its former ids",))
    on = model.Devices(resource="r", id="GPU-1")
    sound = Gpu(index=1, uuid="GPU-1", devices=(on,))
    assert found(resources={"r": unfit}, gpus=(sound,)) == [("resource", "critical", "r")]
    assert "resource" not in {kind for kind, *_ in found(resources={"r": unfit}, gpus=(replace(SICK, devices=(on,)),))}
    assert found(resources={"r": unfit}, gpus=(sound,), driver=model.Driver(trouble="x")) == [
        ("driver", "critical", "driver")
    ]
    assert found(resources={"r": replace(unfit, retired=1)}, gpus=(sound,)) == []


def test_the_steps_begin_with_cordon_and_drain_and_work_from_the_operators_shell():
    signal = replace(XID, remedy=Remedy.RESET, persistent=True, action="reset the GPU when no pod has it")
    (problem,) = problems(with_signals(signal), SHELL)
    commands = [step.command for step in problem.steps]
    inside = "kubectl exec -n gpu gpu-plugin-x7 -- gpu-plugin"
    assert commands == [
        "kubectl cordon node-1",
        "kubectl drain node-1 --ignore-daemonsets --delete-emptydir-data",
        f"{inside} release GPU-1",
        "nvidia-smi -i GPU-1 -pm 0 && nvidia-smi --gpu-reset -i GPU-1 && nvidia-smi -i GPU-1 -pm 1",
        f"{inside} resume GPU-1",
        "kubectl uncordon node-1",
    ]
    (problem,) = problems(with_signals(replace(signal, persistent=False)), OUTSIDE)
    assert [step.command for step in problem.steps] == [
        "gpu-plugin release GPU-1",
        "nvidia-smi --gpu-reset -i GPU-1",
        "gpu-plugin resume GPU-1",
    ]


def test_a_released_gpu_is_not_released_again():
    order = replace(XID, name="maintenance", remedy=Remedy.RESUME)
    some = problems(with_signals(replace(XID, remedy=Remedy.RESET), order), SHELL)
    assert "release" not in " ".join(step.command for step in some[0].steps)
    assert some[1].steps[-1].command.endswith("gpu-plugin resume GPU-1")


def test_an_override_is_not_offered_for_a_fault():
    for remedy in Remedy:
        for problem in problems(with_signals(replace(XID, remedy=remedy, action="do it")), SHELL):
            assert problem.steps
            assert not any("override" in step.command for step in problem.steps)


def test_advice_that_the_steps_lack_is_the_first_step():
    signal = replace(XID, remedy=Remedy.REBOOT, action="check the GPU's power cables and seat, then reboot the node")
    (problem,) = problems(with_signals(signal), SHELL)
    assert problem.steps[0].text.startswith("Check the GPU's power cables")
    (problem,) = problems(
        with_signals(replace(XID, remedy=Remedy.RESET, action=f"{RESET}; at 60 pages replace it")), SHELL
    )
    assert problem.steps[0].text.endswith("at 60 pages replace it")
    (problem,) = problems(with_signals(replace(XID, remedy=Remedy.RESET, action=RESET)), SHELL)
    assert problem.steps[0].command.startswith("kubectl cordon")


def test_a_pending_change_is_a_note_with_the_steps_and_the_way_back():
    notice = Notice(title="t", found="f", action="a", resets=True, undo="nvidia-smi -mig 0")
    (problem,) = problems(replace(WELL, gpus=(Gpu(index=0, uuid="GPU-0", notices=(notice,)),)), SHELL)
    assert problem.severity == "note"
    assert problem.steps[-1].command == "nvidia-smi -mig 0"
    assert any("--gpu-reset" in step.command for step in problem.steps)


@pytest.mark.parametrize("kind", REMEDIES)
@pytest.mark.parametrize("shell", [SHELL, OUTSIDE])
def test_every_command_is_complete(kind, shell):
    for step in of(kind, shell):
        assert step.text
        assert not any(word in step.command for word in ("NODE", "NAMESPACE", "POD", "LOG", "RESTART"))


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ((), "No GPU is known yet"),
        ((Gpu(index=0, uuid="GPU-0"),), "The GPU is Healthy"),
        (tuple(Gpu(index=at, uuid=f"GPU-{at}") for at in range(8)), "All 8 GPUs are Healthy"),
        ((Gpu(index=0, uuid="A"), Gpu(index=1, uuid="B", state="held-back", healthy=False)), "1 held-back"),
        ((Gpu(index=0, uuid="A"), Gpu(index=1, uuid="B", state="degraded")), "All 2 GPUs are Healthy, 1 degraded"),
    ],
)
def test_the_headline_of_a_node_without_problems_counts_its_gpus(gpus, words):
    assert words in headline(replace(WELL, gpus=gpus), ())


def test_severities_are_in_order():
    status = replace(
        WELL,
        gpus=(SICK,),
        driver=model.Driver(restart="r"),
        unoffered=("u",),
        cdi=model.Cdi(directory="/c", complaints=("left out",)),
    )
    order = [SEVERITIES.index(each.severity) for each in problems(status, SHELL)]
    assert order == sorted(order)
    assert len(set(order)) == 3
