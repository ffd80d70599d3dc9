"""The systemd units: the checks of systemd, and the daemon in their sandbox (`sandbox.py`) with the stand-in kubelet."""

import ctypes
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.cli import main
from gpu_plugin.config.settings import OPTIONS
from gpu_plugin.mps.control_program import PROGRAM
from tests.needed import cannot, found
from tests.node.daemon import GPU, healthy
from tests.node.mps_process import SHARED
from tests.real import sandbox, systemd

pytestmark = pytest.mark.anyio

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
PLUGIN, MPS = UNITS / "gpu-plugin.service", UNITS / "gpu-plugin-mps.service"
NETWORK, MIG = UNITS / "drop-ins" / "network.conf", UNITS / "drop-ins" / "mig.conf"
EXPOSURE = {"plugin": 0.9, "plugin with drop-ins": 2.1, "mps": 5.3}
"""The exposure level of `systemd-analyze security`, systemd 252: from 0 (most restricted) to 10."""

PROBE = """
import json, mmap, os, socket
def tried(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except OSError as error:
        return error.strerror
    return "done"
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16) | int(status["CapBnd"], 16),
    "no_new_privs": status["NoNewPrivs"],
    "network": os.readlink("/proc/self/ns/net"),
    "unix": tried(socket.socket, socket.AF_UNIX), "inet": tried(socket.socket, socket.AF_INET),
    "inet6": tried(socket.socket, socket.AF_INET6), "netlink": tried(socket.socket, socket.AF_NETLINK),
    "writable code": tried(mmap.mmap, -1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC),
    "chown": tried(os.chown, "/run/cdi", 1, 1), "setuid": tried(os.setuid, 1),
    "files": {path: tried(os.mkdir, path + "/probe") for path in %r},
}))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system root with the units, installed as in docs/systemd.md, and the units' programs."""
    system = tmp_path / "etc/systemd/system"
    (system / "gpu-plugin.service.d").mkdir(parents=True)
    for unit in (PLUGIN, MPS):
        shutil.copy(unit, system)
        for key in ("ExecStartPre", "ExecStart", "ExecReload"):
            for command in sandbox.settings(unit).get(key, ()):
                program = tmp_path / command.split()[0].lstrip("+-/")
                program.parent.mkdir(parents=True, exist_ok=True)
                program.write_text("#!/bin/sh\n")
                program.chmod(0o755)
    return tmp_path


def _drop_in(root: Path, *files: Path) -> None:
    for file in files:
        shutil.copy(file, root / "etc/systemd/system/gpu-plugin.service.d")


def _verify(root: Path, *units: str) -> subprocess.CompletedProcess[str]:
    # The units in After= are not in that root. Only the recursive check would report that.
    command = [found(systemd.find), "verify", f"--root={root}", "--recursive-errors=no", "--man=no", *units]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("drop_ins", [(), (NETWORK,), (MIG,), (NETWORK, MIG)], ids=["bare", "network", "mig", "both"])
def test_systemd_knows_every_key_and_value(root, drop_ins):
    _drop_in(root, *drop_ins)
    verified = _verify(root, PLUGIN.name, MPS.name)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


def test_a_key_that_systemd_does_not_know_would_be_told(root):
    drop_in = root / "etc/systemd/system/gpu-plugin.service.d/wrong.conf"
    drop_in.write_text("[Service]\nNoNewPrivilege=yes\n")
    assert "NoNewPrivilege'" in _verify(root, PLUGIN.name).stderr


@pytest.mark.parametrize(
    ("unit", "drop_ins", "bound"),
    [
        (PLUGIN, (), EXPOSURE["plugin"]),
        (PLUGIN, (NETWORK, MIG), EXPOSURE["plugin with drop-ins"]),
        (MPS, (), EXPOSURE["mps"]),
    ],
    ids=EXPOSURE,
)
def test_exposure_is_no_greater_than_measured(root, unit, drop_ins, bound):
    _drop_in(root, *drop_ins)
    command = [found(systemd.find), "security", "--offline=true", f"--root={root}", "--no-pager", unit.name]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in output.splitlines() if "Overall exposure level" in line]
    assert float(line.partition(": ")[2].split()[0]) <= bound, output


def test_units_run_commands_and_variables_that_exist(capsys):
    for unit in (PLUGIN, MPS):
        for key in ("ExecStartPre", "ExecStart"):
            for command in sandbox.settings(unit).get(key, ()):
                program, *arguments = command.lstrip("+").split()
                if program.endswith("/gpu-plugin"):
                    assert main([*arguments, "--help"]) == 0
                    flags = [word for word in arguments if word.startswith("--")]
                    assert all(flag in capsys.readouterr().out for flag in flags)
    known = {env for option in OPTIONS for env in option.envs}
    lines = [line.lstrip("#") for line in (UNITS / "environment").read_text().splitlines()]
    named = [line.partition("=")[0] for line in lines if "=" in line and " " not in line.partition("=")[0]]
    named += [value.partition("=")[0] for value in sandbox.settings(MPS)["Environment"]]
    assert named
    assert set(named) <= known


# In the sandbox

RUN = (sys.executable, "-m", "gpu_plugin", "run")


class Sandboxed:
    """Programs in the sandbox of gpu-plugin.service. A directory of this machine replaces each directory that they may write."""

    def __init__(self, root: Path) -> None:
        self.kubelet_root, self.state, self.cdi, self.mps = (root / name for name in ("kubelet", "state", "cdi", "mps"))
        self.directory = self.kubelet_root / "device-plugins"
        self.log = root / "log"
        self.processes: list[subprocess.Popen[bytes]] = []
        for directory in (self.directory, self.state, self.cdi, self.mps / "shm"):
            directory.mkdir(parents=True)

    def command(self, *program: str, unit: Path = PLUGIN, drop_ins: Sequence[Path] = ()) -> list[str]:
        places = {
            "/var/lib/kubelet": self.kubelet_root,
            "/var/lib/kubelet/device-plugins": self.directory,
            "/var/lib/gpu-plugin": self.state,
            "/run/cdi": self.cdi,
            "/run/nvidia/mps": self.mps,
        }
        return [
            *(sys.executable, "-m", "tests.real.sandbox", str(unit), *map(str, drop_ins)),
            *("--", *(f"{here}:{path}" for path, here in places.items()), "--", *program),
        ]

    def start(self, drop_ins: Sequence[Path] = (), **environ: str) -> subprocess.Popen[bytes]:
        """Start `gpu-plugin run` without flags, as in the unit."""
        return self._run(self.command(*RUN, drop_ins=drop_ins), environ)

    def start_mps(self, **environ: str) -> subprocess.Popen[bytes]:
        """Start `gpu-plugin mps` as in its unit."""
        own = dict(word.split("=", 1) for word in sandbox.settings(MPS)["Environment"])
        return self._run(self.command(sys.executable, "-m", "gpu_plugin", "mps", unit=MPS), {**own, **environ})

    def start_outside(self, **environ: str) -> subprocess.Popen[bytes]:
        """Start `gpu-plugin run` outside of the sandbox."""
        own = {"DEVICE_PLUGIN_DIR": str(self.directory), "STATE_DIR": str(self.state), "CDI_DIR": str(self.cdi)}
        # Drop the right to create device nodes: otherwise NVIDIA's library would create this machine's /dev/nvidiactl.
        return self._run(("setpriv", "--bounding-set=-mknod", "--inh-caps=-mknod", *RUN), {**own, **environ})

    def _run(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment = {**_clean(), "HEALTH_POLL_INTERVAL": "100ms", **environ}
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=UNITS.parents[1])
        self.processes.append(process)
        return process

    def probe(self, *drop_ins: Path) -> Mapping[str, object]:
        """Run PROBE in the sandbox and return its result: the rights of a program there."""
        paths = ("/etc", "/usr", "/opt", "/run", "/run/cdi", "/var/lib", "/var/lib/gpu-plugin", "/var/lib/kubelet")
        program = PROBE % ((*paths, "/var/lib/kubelet/device-plugins"),)
        command = self.command(sys.executable, "-c", program, drop_ins=drop_ins)
        done = subprocess.run(command, capture_output=True, text=True, cwd=UNITS.parents[1], check=False)
        assert done.returncode == 0, done.stderr
        output: Mapping[str, object] = json.loads(done.stdout)
        return output

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _clean() -> dict[str, str]:
    known = {env for option in OPTIONS for env in option.envs}
    return {name: value for name, value in os.environ.items() if name not in known}


@pytest.fixture
def sandboxed(short_path: Path) -> Iterator[Sandboxed]:
    found(systemd.find)
    if os.geteuid() != 0:
        cannot("the sandbox is made by root")
    if not _has_seccomp():
        cannot("there is no libseccomp.so.2 here (Debian's package libseccomp2)")
    running = Sandboxed(short_path)
    yield running
    running.close()


def _has_seccomp() -> bool:
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return False
    return True


@pytest.fixture
async def kubelet(sandboxed: Sandboxed):
    async with StandInKubelet(sandboxed.directory) as running:
        yield running
    running.check()


def test_the_sandbox_leaves_three_directories_and_unix_sockets(sandboxed):
    seen = sandboxed.probe()
    refused = "Read-only file system"
    assert seen == {
        "capabilities": 0,
        "no_new_privs": "1",
        "network": seen["network"],
        "unix": "done",
        "inet": "Address family not supported by protocol",
        "inet6": "Address family not supported by protocol",
        "netlink": "Address family not supported by protocol",
        "writable code": "Operation not permitted",
        "chown": "Operation not permitted",
        "setuid": "Operation not permitted",
        "files": {
            "/etc": refused,
            "/usr": refused,
            "/opt": refused,
            "/run": refused,
            "/run/cdi": "done",
            "/var/lib": refused,
            "/var/lib/gpu-plugin": "done",
            "/var/lib/kubelet": refused,
            "/var/lib/kubelet/device-plugins": "done",
        },
    }
    assert seen["network"] != str(Path("/proc/self/ns/net").readlink())


def test_drop_ins_add_what_they_say_and_nothing_else(sandboxed):
    bare = sandboxed.probe()
    for directory in (sandboxed.cdi, sandboxed.state, sandboxed.directory):
        (directory / "probe").rmdir()
    seen = sandboxed.probe(NETWORK, MIG)
    added = {
        "capabilities": 1 << 21,
        "inet": "done",
        "inet6": "done",
        "network": str(Path("/proc/self/ns/net").readlink()),
    }
    assert seen == {**bare, **added}


async def test_the_daemon_does_its_work_in_the_sandbox(sandboxed, kubelet):
    settings = {"SIMULATE": "hgx-h100", "DEVICE_LIST_STRATEGY": "cdi-cri"}
    process = sandboxed.start(**settings)
    await kubelet.wait_for(healthy(kubelet, 8), timeout=20)
    assert main(["fault", "--state-dir", str(sandboxed.state), "--gpu", "3", "--xid", "79"]) == 0
    await kubelet.wait_for(healthy(kubelet, 7))
    [allocation] = (await kubelet.admit("pod", {GPU: 2})).allocations
    names = {device["name"] for each in _specs(sandboxed.cdi) for device in each["devices"]}
    assert {name.rpartition("=")[2] for name in allocation.response.cdi_devices} <= names
    assert len(allocation.response.cdi_devices) == 2
    for file in sandboxed.cdi.iterdir():
        assert (
            stat.S_IMODE(file.stat().st_mode) == 0o644
        )  # other users' runtimes read the files, although the unit's umask is 0077
    await kubelet.restart()
    await kubelet.wait_for(healthy(kubelet, 7))

    began = time.perf_counter()
    process.terminate()
    assert await anyio.to_thread.run_sync(process.wait) == 0
    assert time.perf_counter() - began < 2
    sandboxed.start(**settings)
    await kubelet.wait_for(healthy(kubelet, 7), timeout=20)  # the daemon wrote to the state directory
    output = sandboxed.log.read_text()
    for trouble in ("Traceback", "not permitted", "ermission denied", "ead-only"):
        lines = [line for line in output.splitlines() if trouble in line and "simulated device nodes" not in line]
        assert not lines


async def test_the_network_drop_in_lets_the_probes_be_answered(sandboxed, kubelet):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sandboxed.start([NETWORK], SIMULATE="hgx-h100", HTTP_ADDRESS=f"127.0.0.1:{port}")
    await kubelet.wait_for(healthy(kubelet, 8), timeout=20)
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")


async def test_mps_daemons_of_their_unit_serve_the_plugin_of_its(sandboxed, kubelet, nvidia):
    (sandboxed.state / "config.yaml").write_text(SHARED % 2)
    settings = {"SIMULATE": "hgx-h100", "CONFIG_FILE": "/var/lib/gpu-plugin/config.yaml", "MPS_ROOT": "/run/nvidia/mps"}
    sandboxed.start(**settings)
    await kubelet.wait_for(healthy(kubelet, 0), timeout=20)
    daemons = sandboxed.start_mps(**settings, MPS_CONTROL_BINARY=str(nvidia / "usr/bin" / PROGRAM))
    await kubelet.wait_for(healthy(kubelet, 16), timeout=30)
    output = sandboxed.log.read_text()
    assert "/dev/shm" not in output  # it belongs to the MPS root
    daemons.terminate()
    assert await anyio.to_thread.run_sync(daemons.wait) == 0
    await kubelet.wait_for(healthy(kubelet, 0))


def _specs(directory: Path) -> list[Mapping[str, list[Mapping[str, str]]]]:
    return [json.loads(file.read_text()) for file in directory.iterdir() if file.suffix == ".json"]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_nvidias_library_says_in_the_sandbox_what_it_says_outside(sandboxed, nvidia, inside):
    """The sandbox could block the library's load, threads and files. Without a GPU the library does nothing more."""
    environ = {"DRIVER_ROOT_CTR_PATH": str(nvidia), "NVIDIA_DRIVER_ROOT": str(nvidia), "FAIL_ON_INIT_ERROR": "true"}
    process = sandboxed.start(**environ) if inside else sandboxed.start_outside(**environ)
    assert process.wait() == 1
    assert "nvmlInit: driver not loaded (9)" in sandboxed.log.read_text()
