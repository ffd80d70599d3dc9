"""Exit statuses, the same for all verbs: 2 where what is asked cannot be, 3 without a daemon, 1 where it is refused."""

import anyio.to_thread
import pytest

from gpu_plugin.cli import main
from gpu_plugin.simulation.profile import load
from tests.node.daemon import healthy

SUCCESS, PROBLEM_FOUND, USAGE, NO_DAEMON = 0, 1, 2, 3
ASKS_FOR_A_GPU = {
    "explain": (),
    "events": ("--gpu",),
    "cordon": (),
    "uncordon": (),
    "release": (),
    "resume": (),
    "fault": ("--heal", "--gpu"),
    "simulate-allocation": ("--size", "1", "--must"),
}
"""Every verb that takes a GPU, with the arguments before the GPU's name."""

HOME = load("t4-4").gpus[1]
NAMES = ("1", HOME.uuid, HOME.uuid[:12], HOME.uuid[4:12].upper(), HOME.pci_bus_id, "0000:5e:00.0", "5e:00.0")
STRANGERS = ("99", "GPU-00000000-0000-0000-0000-000000000000", "0000:ff:00.0", "ff:00.0", "nobody", "GPU-", "")


def told(state: object, verb: str, gpu: str) -> int:
    return main([verb, "--state-dir", str(state), *ASKS_FOR_A_GPU[verb], gpu])


async def test_a_gpu_is_named_alike_in_every_verb_and_one_that_is_not_there_is_bad_usage_in_every_verb(
    kubelet, daemon, capfd
):
    daemon.profile = "t4-4"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))

    def statuses(names: tuple[str, ...]) -> set[tuple[str, str, int]]:
        return {(verb, name, told(daemon.state, verb, name)) for verb in ASKS_FOR_A_GPU for name in names}

    found = await anyio.to_thread.run_sync(statuses, NAMES)
    assert {each for each in found if each[2] != SUCCESS} == set()
    capfd.readouterr()
    found = await anyio.to_thread.run_sync(statuses, STRANGERS)
    assert {each for each in found if each[2] != USAGE} == {("simulate-allocation", "", SUCCESS)}  # an empty list
    said = capfd.readouterr().err.splitlines()
    assert len(said) == len(found) - 1  # a sentence each
    assert all(line.startswith("gpu-plugin ") for line in said)


@pytest.mark.parametrize("verb", [*ASKS_FOR_A_GPU, "status", "topology"])
def test_without_a_daemon_it_is_three(tmp_path, verb, capsys):
    file = tmp_path / "file"
    file.touch()
    for state in (tmp_path, tmp_path / "nowhere", file):
        arguments = [*ASKS_FOR_A_GPU[verb], "0"] if verb in ASKS_FOR_A_GPU else []
        assert main([verb, "--state-dir", str(state), *arguments]) == NO_DAEMON
        (line,) = capsys.readouterr().err.splitlines()
        assert str(state) in line


TOO_MANY = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 10000}]}}\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("version: v1\nflags: {migStrategy: maybe}\n", "migStrategy", id="cannot be"),
        pytest.param(TOO_MANY, "nvidia.com/gpu", id="the node cannot do it"),
    ],
)
async def test_a_configuration_that_cannot_be_or_that_the_node_cannot_do_is_bad_usage(daemon, tmp_path, content, says):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    daemon.start("--config-file", str(file))
    assert await daemon.exit() == USAGE
    assert says in daemon.log.read_text()


@pytest.mark.parametrize("below", ["", "further/down"])
async def test_a_state_directory_that_is_a_file_is_one_sentence(daemon, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("not ours")
    daemon.state = file / below
    daemon.start()
    assert await daemon.exit() == USAGE
    (line,) = daemon.log.read_text().splitlines()
    assert f"--state-dir: {daemon.state}: " in line
    assert "is not a directory, so no file can be stored there" in line
    assert file.read_text() == "not ours"


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--config-file", "/nonexistent"],
        ["validate", "/nonexistent"],
        ["mps", "--config-file", "/nonexistent"],
        ["cdi", "generate", "--config-file", "/nonexistent"],
        ["cdi", "validate", "/nonexistent"],
        ["cdi", "generate", "--simulate", "nowhere"],
        ["topology", "--simulate", "nowhere"],
        ["simulate-allocation", "--size", "1", "--simulate", "nowhere"],
        ["run", "--mig-strategy", "maybe"],
        ["events", "--since", "yore"],
        ["status", "--watch", "often"],
        ["fault", "--gpu", "0"],
        ["cleanup", "--cdi-dir", "relative"],
        ["uninstall", "--namespace", "n", "--daemonset", "d", "--timeout", "soon"],
        ["uninstall", "--namespace", "n", "--daemonset", "d", "--kubeconfig", "/nonexistent"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_bad_usage_in_every_verb(arguments, capsys):
    assert main(arguments) == USAGE
    shown = capsys.readouterr()
    assert len((shown.err + shown.out).splitlines()) == 1
