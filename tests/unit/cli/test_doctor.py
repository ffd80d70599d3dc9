"""`gpu-plugin doctor`, the whole verb: its output, the width of its lines, and its exit status."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import yaml
from anyio import to_thread

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.cli import main
from gpu_plugin.cli.doctor import lines
from gpu_plugin.doctor.checks import CHECKS
from gpu_plugin.doctor.finding import failed, note, ok, skipped, warning
from gpu_plugin.runtime import control
from gpu_plugin.status.model import Configuration
from tests.unit.doctor.made_up import status

FOUND = [
    ("clock", ok("synchronised, within 20 ms")),
    (
        "driver-library",
        failed("there is no libnvidia-ml.so.1 below /driver-root, /", "install the NVIDIA driver on the node"),
    ),
    ("device-nodes", warning("/dev/nvidia-uvm: does not exist", "modprobe nvidia-uvm on the node")),
    ("daemon", note("no daemon answers", "look at its log")),
    ("mps", skipped("no resource is shared by MPS")),
]


EXAMPLE = Path(__file__).parents[3] / "docs/simulated-node.yaml"

AS_NOBODY = """
import contextlib, hashlib, io, os, queue, sys, yaml  # those three as well, which are the looking process's
from gpu_plugin.cli import main
if not os.geteuid():
    with contextlib.redirect_stdout(io.StringIO()):
        main(sys.argv[1:])  # imports everything, from where another user may not look
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""


HANGING_FILE = """
import os, sys
from gpu_plugin.cli import main, options

def opened(file, **_):
    os.close(os.open(file, os.O_RDONLY))  # a pipe that nobody writes to holds whoever opens it so

options.open_file = opened
sys.exit(main(sys.argv[1:]))
"""


def arguments(directory: Path, *more: str) -> list[str]:
    """The verb on a simulated node whose directories are all below this one."""
    plugins = directory / "k/device-plugins"
    own = ["--simulate", "t4-4", "--device-plugin-dir", str(plugins), "--state-dir", str(directory / "state")]
    return ["doctor", *own, "--timeout", "2s", *more]


def test_what_is_wrong_comes_first_with_its_remedy():
    assert list(lines(FOUND)) == [
        "failed   driver-library  there is no libnvidia-ml.so.1 below /driver-root, /",
        "                         do: install the NVIDIA driver on the node",
        "warning  device-nodes    /dev/nvidia-uvm: does not exist",
        "                         do: modprobe nvidia-uvm on the node",
        "",
        "note     daemon          no daemon answers",
        "                         do: look at its log",
        "ok       clock           synchronised, within 20 ms",
        "skipped  mps             no resource is shared by MPS",
        "",
        "1 failed: driver-library; 1 with warnings",
    ]


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 200])
def test_text_fits_the_terminal(columns):
    shown = list(lines(FOUND, columns))
    assert max(map(len, shown)) <= columns
    assert " ".join(" ".join(shown).split()) == " ".join(" ".join(lines(FOUND)).split())  # and nothing is lost


@pytest.mark.parametrize(
    ("found", "last"),
    [
        (FOUND[:1], "nothing failed"),
        ([FOUND[2], *FOUND[:1]], "nothing failed; 1 with warnings: device-nodes"),
        ([FOUND[1], FOUND[1]], "1 failed: driver-library"),
    ],
)
def test_the_last_line_sums_it_up(found, last):
    assert list(lines(found))[-1] == last


def test_text_of_others_tells_the_terminal_nothing():
    [first, *_] = lines([("daemon", failed("\x1b[2J\nok  daemon", "\x07"))])
    assert first == "failed   daemon  \\x1b[2J\\nok  daemon"


async def test_a_node_that_is_well(short_path, capsys):
    plugins = short_path / "k/device-plugins"
    plugins.mkdir(parents=True)
    (plugins / "kubelet_internal_checkpoint").write_text("{}")
    async with StandInKubelet(plugins, pod_resources_socket=short_path / "k/pods.sock") as kubelet:
        given = arguments(short_path, "--pod-resources-socket", str(short_path / "k/pods.sock"), "-o", "json")
        status = await to_thread.run_sync(main, given)
        assert not kubelet.registrations
    told = json.loads(capsys.readouterr().out)
    stands = {each["check"]: each["status"] for each in told["findings"]}
    assert status == 0, told
    assert told["healthy"] is True
    assert list(stands) == list(CHECKS)
    assert [stands[name] for name in ("gpus", "driver-library", "state-directory")] == ["ok"] * 3
    assert (stands["kubelet-directory"], stands["pod-resources"]) == ("ok", "ok")
    assert not (short_path / "state").exists()


def test_a_node_without_a_kubelet(short_path, capsys):
    assert main(arguments(short_path)) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("failed   kubelet-directory ")
    assert said[-1].startswith("2 failed: kubelet-directory, kubelet-socket")
    assert main(arguments(short_path, "-o", "yaml")) == 1
    told = yaml.safe_load(capsys.readouterr().out)
    [missing] = [each for each in told["findings"] if each["check"] == "kubelet-socket"]
    assert (missing["status"], told["healthy"]) == ("failed", False)
    assert "kubelet.sock" in missing["found"]
    assert missing["remedy"]


def test_a_configuration_that_is_refused_is_a_finding(short_path, capsys):
    file = short_path / "config.yaml"
    file.write_text("version: v1\nflags: {migStrategie: single}\n")
    assert main(arguments(short_path, "--config-file", str(file), "-o", "json")) == 1
    [first, *others] = json.loads(capsys.readouterr().out)["findings"]
    assert (first["check"], first["status"]) == ("configuration", "failed")
    assert "migStrategie" in first["found"]
    assert len(others) >= len(CHECKS) - 1


def test_the_file_that_the_nodes_label_names_is_the_daemons(short_path, capsys, monkeypatch):
    file = short_path / "chosen.yaml"
    file.write_text("version: v1\nflags: {plugin: {deviceListStrategy: cdi-cri}}\n")
    monkeypatch.setattr(
        control, "request", lambda *_: msgspec.to_builtins(status(configuration=Configuration(file=str(file))))
    )
    main(arguments(short_path, "--config-file-srcdir", str(short_path), "--node-name", "n", "-o", "json"))
    found = {each["check"]: each["found"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["configuration"] == f"{file} can be used"
    assert found["container-runtime"].startswith("cdi-cri")


@pytest.mark.parametrize("answered", [None, [], "a.yaml", {"file": None}, {"file": 3}, {}])
def test_a_daemon_that_says_otherwise_which_file_the_label_names_says_none(short_path, capsys, monkeypatch, answered):
    monkeypatch.setattr(control, "request", lambda *_: {**msgspec.to_builtins(status()), "configuration": answered})
    main(arguments(short_path, "--config-file-srcdir", str(short_path), "--node-name", "n", "-o", "json"))
    found = {each["check"]: each["found"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "no daemon says which" in found["configuration"]


def test_a_config_file_that_hangs_is_a_finding(short_path):
    file = short_path / "config.yaml"
    os.mkfifo(file)
    command = [sys.executable, "-c", HANGING_FILE, *arguments(short_path, "--config-file", str(file), "-o", "json")]
    done = subprocess.run([*command, "--timeout", "200ms"], check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1, done.stderr
    [first, *others] = json.loads(done.stdout)["findings"]
    assert (first["check"], first["status"]) == ("configuration", "failed")
    assert f"{file}: no answer within 0.2 s" in first["found"]
    assert "state D" in first["remedy"]
    assert len(others) >= len(CHECKS) - 1


def test_a_daemon_that_never_says_which_file_the_label_names_is_not_waited_for(short_path):
    (short_path / "state").mkdir()
    command = [sys.executable, "-m", "gpu_plugin", *arguments(short_path, "--timeout", "200ms", "-o", "json")]
    command += ["--config-file-srcdir", str(short_path), "--node-name", "n"]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(short_path / "state" / control.SOCKET))
        silent.listen()
        began = time.monotonic()
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
        took = time.monotonic() - began
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert took < control.PATIENCE, done.stderr
    assert "no daemon says which" in found["configuration"]["found"]
    assert "no answer within 0.2 s" in found["daemon"]["found"]


def test_a_path_that_is_no_text(short_path, capsys):
    assert main(arguments(short_path, "--state-dir", f"{short_path}/\udcff", "-o", "json")) == 1
    [state] = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["check"] == "state-directory"]
    assert "\\udcff can be written" in state["found"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--simulate", "t5"), "no simulated node is called 't5'"),
        (("--timeout", "soon"), "--timeout: "),
        (("--mig-strategy", "double"), "mig-strategy"),
        (("-o", "xml"), "xml"),
    ],
)
def test_usage(short_path, capsys, more, said):
    assert main(arguments(short_path, *more)) == 2
    assert said in capsys.readouterr().err


def test_as_another_user(short_path):
    """Without root, checks note facts that they cannot see, and do not fail."""
    short_path.chmod(0o755)
    for name in ("k/device-plugins", "state"):
        (short_path / name).mkdir(parents=True)
    (short_path / "state").chmod(0o700)
    copied = shutil.copy(EXAMPLE, short_path)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments(short_path, "--simulate", str(copied), "-o", "json")],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1, done.stderr
    stands = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert stands["permissions"]["status"] == "note"
    assert "as root" in stands["permissions"]["remedy"]
    assert stands["kubelet-directory"]["status"] == "note"
    assert [name for name, each in stands.items() if each["status"] == "failed"] == ["kubelet-socket"]
