import io
import json
import sys
from types import SimpleNamespace

import pytest
import yaml

from gpu_plugin import cli
from gpu_plugin.cli.options import settings_from
from gpu_plugin.config import json_schema
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import Settings

SHARED = "sharing:\n  timeSlicing:\n    resources:\n      - {name: gpu, replicas: 4, rename: gpu.shared}\n"
MPS = "sharing:\n  mps:\n    resources:\n      - {name: gpu, replicas: 4}\n"
WRONG = "flags:\n  migStrategi: none\nsharing:\n  timeSlicing:\n    resources: []\n"


@pytest.fixture
def file(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_a_valid_file_is_said_to_be_and_written_out(file, capsys):
    name = file(SHARED)
    assert cli.main(["validate", name]) == 0
    _, first, rest = capsys.readouterr().out.split("\n", 2)
    assert first == f"{name}: valid"
    config = yaml.safe_load(rest)
    assert config["flags"]["migStrategy"] == "none"
    assert config["flags"]["healthPollInterval"] == "5s"
    assert config["sharing"]["timeSlicing"] == {
        "failRequestsGreaterThanOne": False,
        "resources": [{"name": "nvidia.com/gpu", "rename": "nvidia.com/gpu.shared", "replicas": 4}],
    }
    assert resolve({}, {}, config) == resolve({}, {}, yaml.safe_load(SHARED))


def test_each_of_several_files_has_its_verdict(file, capsys):
    good, wrong, missing = file(SHARED, "good.yaml"), file(WRONG, "wrong.yaml"), "/no/such/file"
    assert cli.main(["validate", wrong, good, missing]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{wrong}:2: ")
    assert f"{good}: valid" in lines
    assert lines[-1] == f"{missing}: No such file or directory"
    assert cli.main(["validate", good, file(SHARED, "other.yaml")]) == 0


def test_what_has_no_effect_is_warned_of_with_its_line_and_is_no_fault(file, capsys):
    name = file("flags:\n  gfd: {oneshot: true}\n")
    assert cli.main(["validate", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"{name}:2: flags.gfd: warning: read by gpu-feature-discovery, not by this plugin",
        f"{name}: valid",
    ]


def test_json(file, capsys):
    good, wrong = file(SHARED, "good.yaml"), file(f"{WRONG}imex: {{channelIDs: []}}\n", "wrong.yaml")
    assert cli.main(["validate", "--json", good, wrong]) == 2
    one, other = json.loads(capsys.readouterr().out)
    assert (one["file"], one["valid"], one["faults"]) == (good, True, [])
    assert one["warnings"] == [
        {
            "line": 4,
            "column": 34,
            "path": "",
            "reason": "sharing.timeSlicing.resources[0].rename: applied here, ignored by NVIDIA's plugin v0.20.0",
        }
    ]
    assert one["config"]["sharing"]["timeSlicing"]["resources"][0]["rename"] == "nvidia.com/gpu.shared"
    assert (other["valid"], other["config"]) == (False, {})
    assert other["faults"][1] == {
        "line": 5,
        "column": 5,
        "path": "sharing.timeSlicing.resources",
        "reason": "no resources specified",
    }


@pytest.mark.parametrize(("text", "status"), [(SHARED, 0), (WRONG, 2)])
def test_standard_input(text, status, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert cli.main(["validate", "-"]) == status
    out = capsys.readouterr().out
    assert ("-: valid\n" if status == 0 else "<stdin>:2: flags.migStrategi: ") in out


def test_files_are_judged_with_the_flags_they_are_meant_for_and_without_the_environment(file, capsys, monkeypatch):
    monkeypatch.setenv("MPS_ROOT", "/run/nvidia/mps")
    monkeypatch.setenv("MIG_STRATEGY", "nonsense")
    name = file(MPS)
    assert cli.main(["validate", name]) == 2
    assert "using MPS requires --mps-root to be specified" in capsys.readouterr().out
    assert cli.main(["validate", "--mps-root", "/run/nvidia/mps", name]) == 0
    assert "mpsRoot: /run/nvidia/mps" in capsys.readouterr().out
    assert cli.main(["validate", "--mps-root=/a", "--mig-strategy=mixed", name]) == 2
    assert capsys.readouterr().out == (f"{name}:2: sharing.mps: using --mig-strategy=mixed is not supported with MPS\n")


def test_with_env_the_environment_counts_as_it_does_for_run(file, capsys, monkeypatch):
    name = file(MPS)
    monkeypatch.setenv("MPS_ROOT", "/run/nvidia/mps")
    assert cli.main(["validate", "--env", name]) == 0
    assert "mpsRoot: /run/nvidia/mps" in capsys.readouterr().out
    monkeypatch.setenv("MIG_STRATEGY", "mixed")
    assert cli.main(["validate", "--env", "--json", name]) == 2
    assert "--mig-strategy=mixed is not supported with MPS" in capsys.readouterr().out
    assert cli.main(["validate", "--env", "--mig-strategy=none", name]) == 0
    monkeypatch.setenv("CONFIG_FILE", name)
    capsys.readouterr()
    assert cli.main(["validate", "--env"]) == 2
    assert capsys.readouterr().out.startswith(f"{name}:2: sharing.mps: ")


def test_with_env_and_no_file_at_all_flags_and_variables_are_judged(capsys, monkeypatch):
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    monkeypatch.setenv("NVML_TIMEOUT", "1y")
    assert cli.main(["validate", "--env"]) == 2
    assert capsys.readouterr().out.startswith("environment variable NVML_TIMEOUT: '1y' is not a duration")
    monkeypatch.setenv("NVML_TIMEOUT", "7s")
    assert cli.main(["validate", "--env"]) == 0
    assert "flags and environment: valid" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a file, or - for standard input"),
        (["--config-file", "/a", "/b"], "--config-file: name files without it"),
        (["--config-file-srcdir", "/a", "/b"], "--config-file-srcdir: name files without it"),
        (["--no-such-flag", "/b"], "No such option"),
    ],
)
def test_bad_usage_is_one_line(arguments, words, capsys):
    assert cli.main(["validate", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-plugin validate: ")
    assert words in line


def test_the_schema_is_printed_for_editors(capsys):
    assert cli.main(["validate", "--schema"]) == 0
    assert capsys.readouterr().out == json_schema.text()


def test_settings_may_come_from_a_file_that_no_flag_names(file):
    settings = settings_from(
        {"config_file_srcdir": "/a", "node_name": "n"},
        {},
        file("flags: {migStrategy: single, plugin: {nvidiaCTKPath: /x}}"),
    )
    assert isinstance(settings, Settings)
    assert (settings.mig_strategy, settings.config_file, settings.nvidia_cdi_hook_path) == ("single", "", "/x")


@pytest.mark.parametrize(
    ("resources", "line"),
    [
        ("[{name: gpu, replicas: 4}]", None),
        ("[{name: mig-1g.10gb, replicas: 4}]", None),
        ("[{name: example.com/h100, replicas: 4}]", None),
        (
            "[{name: gpu, replicas: 4}, {name: nvidia.com/gpus, replicas: 4}]",
            "resources[1].name: warning: no node counts a device under nvidia.com/gpus",
        ),
    ],
)
def test_sharing_of_what_no_node_has_is_a_warning(file, capsys, resources, line):
    names = "resources:\n  gpus: [{pattern: '*H100*', name: example.com/h100}]\n"
    name = file(f"{names}sharing:\n  timeSlicing:\n    resources: {resources}\n")
    assert cli.main(["validate", name]) == 0
    found = [each for each in capsys.readouterr().out.splitlines() if "no node counts" in each]
    where = f"{name}:5: sharing.timeSlicing.{line}"
    assert found == (
        [] if line is None else [f"{where}; there are example.com/h100, nvidia.com/gpu and nvidia.com/mig-..."]
    )
