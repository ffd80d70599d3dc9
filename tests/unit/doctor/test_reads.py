"""Reads of made-up roots, and of sockets with servers of several kinds."""

import asyncio
import ctypes
import errno
import json
import os
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from anyio import to_thread

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.daemon.hardware import Hardware
from gpu_plugin.doctor.checks import (
    clock,
    device_nodes,
    examine,
    fabric_manager,
    imex_channels,
    kubelet_directory,
    kubelet_socket,
    kubernetes_api,
    mps,
    other_plugins,
)
from gpu_plugin.doctor.directory import read_directory
from gpu_plugin.doctor.driver import KernelModule, describe_gpu, open_driver, read_module
from gpu_plugin.doctor.pod_resources import read_pod_resources
from gpu_plugin.doctor.process import Process, processes, read_process
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.platforms.driver import TegraDriver
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.host import SimulatedHost
from tests.unit.cluster.http_server import _INSECURE
from tests.unit.doctor.made_up import FAILED, NOTE, OK, POD, SKIPPED, USER, WARNING, made_up

VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)\nGCC version: gcc\n"
)


def write(root: Path, path: str, text: str = "") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def listen(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(1)
    return server


def test_process(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    write(tmp_path, "proc/self/status", "Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\nCapEff:\t00000000a80425fb\n")
    write(tmp_path, "proc/self/attr/current", "system_u:system_r:container_t:s0\0")
    write(tmp_path, "proc/1/comm", "gpu-plugin\n")
    write(tmp_path, "sys/fs/selinux/enforce", "1")
    seen = read_process(tmp_path)
    assert (seen.uid, seen.capabilities, seen.seccomp, seen.no_new_privileges) == (os.geteuid(), 0xA80425FB, 2, True)
    assert (seen.selinux, seen.label) == ("enforcing", "system_u:system_r:container_t:s0")
    assert (seen.contained, seen.host_processes) == (True, False)
    write(tmp_path, "proc/1/comm", "systemd\n")
    assert read_process(tmp_path).host_processes


def test_processes_by_name(tmp_path):
    for pid, name in ((7, "nvidia-cuda-mps"), (8, "nvidia-cuda-mps"), (9, "bash")):
        write(tmp_path, f"proc/{pid}/comm", f"{name}\n")
    (tmp_path / "proc/11").mkdir()  # an ended process
    assert processes(tmp_path, "nvidia-cuda-mps") == ((7, "nvidia-cuda-mps"), (8, "nvidia-cuda-mps"))


def test_kernel_module(tmp_path):
    assert read_module(tmp_path) == KernelModule(False)
    write(tmp_path, "sys/module/nouveau/refcnt")
    assert read_module(tmp_path) == KernelModule(False, nouveau=True)
    write(tmp_path, "sys/module/nvidia/version", "575.57.08\n")
    assert read_module(tmp_path).version == "575.57.08"
    write(tmp_path, "proc/driver/nvidia/version", VERSION)
    assert read_module(tmp_path) == KernelModule(True, "580.95.05", True)


def test_a_driver_of_another_version_than_its_module(node, short_path):
    """The library does not report its version then; the name of its file has it, behind the link."""
    write(short_path, "libnvidia-ml.so.580.95.05")
    (short_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.95.05")

    class Mismatched(SimulatedDriver):
        def open(self):
            raise NvmlError(18, "nvmlInit_v2")

    library = str(short_path / "libnvidia-ml.so.1")
    found = open_driver(Hardware(Mismatched(node), SimulatedHost(node), "", library=lambda: library))
    assert (found.code, found.version) == (18, "580.95.05")


def test_a_driver_of_another_platform(node):
    class Tegra(SimulatedDriver):
        chosen = TegraDriver()

    assert open_driver(Hardware(Tegra(node), SimulatedHost(node), "")).platform == "tegra"


def test_a_driver_that_does_not_count(node):
    class Uncountable(SimulatedDriver):
        def device_count(self):
            raise NvmlError(999, "nvmlDeviceGetCount_v2")

    found = open_driver(Hardware(Uncountable(node), SimulatedHost(node), ""))
    assert (found.count, "nvmlDeviceGetCount_v2" in found.count_trouble) == (-1, True)


@pytest.mark.parametrize(
    ("links", "to_switch", "state", "leads", "waits"),
    [
        ((True, True), True, 3, True, True),
        ((False, False), None, 1, True, True),
        ((False, True), False, 0, False, True),
        ((), None, 1, False, False),
    ],
    ids=["switched", "no link up yet", "to another GPU", "passed through alone"],
)
def test_where_nvlinks_lead(node, links, to_switch, state, leads, waits):
    class Linked(SimulatedDriver):
        def nvlink_states(self, handle):
            return links

        def nvlink_to_switch(self, handle, link):
            assert links[link]
            return to_switch

        def fabric(self, handle):
            return Fabric(state)

    driver = Linked(node)
    driver.open()
    gpu = describe_gpu(driver, 0)
    assert (gpu.nvswitch, gpu.fabric is not None) == (leads, waits)


def test_nvswitches(tmp_path):
    devices = (("c1", "0x10de", "0x068000"), ("1b", "0x10de", "0x030200"), ("00", "0x8086", "0x068000"))
    for bus, vendor, kind in devices:
        write(tmp_path, f"sys/bus/pci/devices/0000:{bus}:00.0/vendor", f"{vendor}\n")
        write(tmp_path, f"sys/bus/pci/devices/0000:{bus}:00.0/class", f"{kind}\n")
    (tmp_path / "sys/bus/pci/devices/0000:ff:00.0").mkdir()  # a removed device
    assert fabric_manager.count_switches(tmp_path) == 1


def test_majors_are_those_of_character_devices(tmp_path):
    text = "Character devices:\n  1 mem\n195 nvidia-frontend\n511 nvidia-uvm\n\nBlock devices:\n259 blkext\n"
    write(tmp_path, "proc/devices", text)
    assert device_nodes.read_majors(tmp_path) == {"mem": 1, "nvidia-frontend": 195, "nvidia-uvm": 511}


NULL = {"nvidia": 1}
"""The driver has the major of /dev/null, which is 1:3. Only root can make other device nodes."""

ENFORCING = Process(0, 0, 0, False, True, False, "enforcing", "", False)


@pytest.mark.parametrize(
    ("path", "target", "majors", "status", "words"),
    [
        ("nvidia3", "/dev/null", NULL, OK, "can be opened"),
        ("nvidia4", "/dev/null", NULL, FAILED, "device 1:3, and the driver's is 1:4"),
        ("nvidia3", "/dev/null", {}, FAILED, "the driver's is 195:3"),
        ("nvidiactl", "/dev/null", {}, FAILED, "the driver's is 195:255"),
        ("nvidia-uvm", "/dev/null", {}, OK, "can be opened"),  # the driver's number is not known
        ("nvidia-uvm", "/dev/null", {"nvidia-uvm": 238}, FAILED, "the driver's is 238:0"),
        ("nvidia-uvm-tools", "/dev/null", {"nvidia-uvm": 238}, FAILED, "the driver's is 238:1"),
        ("nvidia3", "/dev", {}, FAILED, "not a character device"),
        ("nvidia3", "/dev/none", {}, FAILED, "does not exist"),
        ("nvidia-uvm", "/dev/none", {}, WARNING, "no CUDA program"),
        ("nvidia-uvm-tools", "/dev/none", {}, OK, "only profilers need it"),
    ],
)
def test_device_nodes(tmp_path, path, target, majors, status, words):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / path).symlink_to(target)
    node = made_up()
    node.root = tmp_path
    found = device_nodes.look(f"/dev/{path}", node, majors)
    assert (found.status, words in found.found) == (status, True), found


@pytest.mark.parametrize(
    ("number", "process", "status", "words"),
    [
        (errno.EPERM, POD, FAILED, "device cgroup"),
        (errno.EACCES, USER, NOTE, "uid 1000 (mode 0666)"),
        (errno.EACCES, ENFORCING, FAILED, "SELinux"),
        (errno.EACCES, POD, FAILED, "AppArmor"),
        (errno.ENXIO, POD, FAILED, "no GPU or module"),
        (errno.EIO, POD, FAILED, "Xid"),
    ],
)
def test_a_device_node_that_cannot_be_opened(tmp_path, monkeypatch, number, process, status, words):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia3").symlink_to("/dev/null")
    node = made_up(process=process)
    node.root = tmp_path
    monkeypatch.setattr(os, "open", refuse)
    found = device_nodes.look("/dev/nvidia3", node, NULL)
    assert (found.status, words in f"{found.found} {found.remedy}") == (status, True), found
    assert os.strerror(number) in found.found


def test_imex_channels(tmp_path):
    write(tmp_path, "dev/nvidia-caps-imex-channels/channel0")
    there = imex_channels.read_channels((str(tmp_path), "/nonexistent"))
    assert there == {"/dev/nvidia-caps-imex-channels/channel0"}


def test_directory(tmp_path):
    write(
        tmp_path,
        "proc/self/mountinfo",
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"22 21 0:5 / {tmp_path}/with\\040blank rw - tmpfs tmpfs rw,size=1\n"
        "broken\n",
    )
    plain, blank = tmp_path / "plain", tmp_path / "with blank/state"
    plain.mkdir(mode=0o750)
    blank.mkdir(parents=True)
    seen = read_directory(str(plain), tmp_path)
    assert (seen.there, seen.is_directory, seen.writable, seen.removed) == (True, True, True, False)
    assert (seen.mount, seen.filesystem, seen.mode) == ("/", "ext4", 0o750)
    assert seen.free_bytes > 0
    assert read_directory(str(blank), tmp_path).filesystem == "tmpfs"
    absent = read_directory(str(blank / "a/b"), tmp_path)
    assert (absent.there, absent.is_directory, absent.writable, absent.filesystem) == (False, False, True, "tmpfs")
    file = write(tmp_path, "file")
    assert not read_directory(str(file), tmp_path).is_directory
    assert not read_directory(str(file / "below"), tmp_path).writable
    assert read_directory("/proc/self", Path("/nonexistent")).filesystem == ""
    assert "too long" in read_directory("/" + "x" * 300, tmp_path).error.lower()


def test_a_directory_that_was_removed_while_it_is_open(tmp_path):
    (tmp_path / "removed").mkdir()
    descriptor = os.open(tmp_path / "removed", os.O_RDONLY)
    (tmp_path / "removed").rmdir()
    try:
        assert read_directory(f"/proc/self/fd/{descriptor}", tmp_path).removed
    finally:
        os.close(descriptor)


def test_a_directory_that_may_not_be_written(short_path):
    short_path.chmod(0o555)
    me = os.geteuid()
    if not me:
        os.seteuid(65534)  # root may write everywhere
    try:
        assert not read_directory(str(short_path), Path("/")).writable
        assert not read_directory(str(short_path / "below"), Path("/")).writable
    finally:
        os.seteuid(me)
    short_path.chmod(0o700)


def socket_at(path: Path, root: Path, patience: float = 2.0):
    """The finding of the kubelet's socket, and its text."""
    found = kubelet_socket.look(str(path), patience, root)
    return found.status, f"{found.found} {found.remedy}"


@pytest.mark.parametrize(
    ("program", "status"), [("kubelet", OK), ("k3s-server", OK), ("python3", WARNING), ("", OK)], ids=str
)
async def test_the_kubelet_answers_on_its_socket_and_keeps_nothing_of_it(short_path, program, status):
    plugins = short_path / "p"
    plugins.mkdir()
    write(short_path, f"proc/{os.getpid()}/comm", program)
    async with StandInKubelet(plugins, pod_resources_socket=short_path / "pods.sock") as running:
        found = await to_thread.run_sync(socket_at, plugins / "kubelet.sock", short_path)
        assert (found[0], f"is answered by process {os.getpid()} ({program})" in found[1]) == (status, True), found
        pods = await to_thread.run_sync(read_pod_resources, str(short_path / "pods.sock"), 2.0)
        assert (pods.trouble, pods.allocated, pods.healthy, pods.absent) == ("", 0, {}, False)
        assert 0 < pods.seconds < 2
    running.check()


def test_a_socket_without_a_server(short_path):
    listen(short_path / "dead").close()
    write(short_path, "file")
    for name, words in (("none", "there is no"), ("file", "is not a socket"), ("dead", "Connection refused")):
        status, said = socket_at(short_path / name, short_path)
        assert (status, words in said) == (FAILED, True), said


def test_a_socket_that_may_not_be_used(short_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    status, said = socket_at(short_path / "s", short_path)
    assert (status, "SELinux" in said) == (FAILED, True)


def test_a_socket_of_another_server(short_path):
    with closing(listen(short_path / "s")) as server:

        def hang_up():
            connection, _ = server.accept()
            with closing(connection):
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=hang_up)
        answering.start()
        status, said = socket_at(short_path / "s", short_path, 5.0)
        answering.join()
    assert (status, f"process {os.getpid()}" in said, "not as a kubelet does" in said) == (FAILED, True, True)


def test_the_kubelets_directory(short_path):
    listen(short_path / "dead.sock").close()
    with ExitStack() as listening:
        for name in ("kubelet.sock", "gpu-plugin-gpu-1.sock", "nvidia-gpu.sock"):
            listening.enter_context(closing(listen(short_path / name)))
        (short_path / "link.sock").symlink_to("nvidia-gpu.sock")
        others = other_plugins.read_others(str(short_path), str(short_path / "kubelet.sock"))
    assert others == ["nvidia-gpu.sock"]
    assert not kubelet_directory.read_kubelet_directory(str(short_path), Path("/"))[1]
    write(short_path, "kubelet_internal_checkpoint", "{}")
    assert kubelet_directory.read_kubelet_directory(str(short_path), Path("/"))[1]
    none, used = kubelet_directory.read_kubelet_directory(str(short_path / "none"), Path("/"))
    assert (none.there, used) == (False, False)


def test_pod_resources_that_are_absent_or_silent(short_path):
    absent = read_pod_resources(str(short_path / "none.sock"), 1.0)
    assert absent.absent
    assert absent.trouble
    with closing(listen(short_path / "s.sock")):
        silent = read_pod_resources(str(short_path / "s.sock"), 0.1)
    assert (silent.absent, "did not answer within 0.1 s" in silent.trouble) == (False, True)


@pytest.mark.parametrize(
    ("now", "kernel", "status", "words"),
    [
        (1.8e9, (True, 0.02), OK, "within 20 ms"),
        (0.0, (True, 0.02), FAILED, "1970-01-01"),
        (1e30, (True, 0.02), FAILED, "certificates"),
        (1.8e9, (False, 0.02), WARNING, "not synchronised"),
        (1.8e9, OSError(1, "adjtimex: denied"), SKIPPED, "adjtimex: denied"),
    ],
)
def test_clock(monkeypatch, now, kernel, status, words):
    def answer():
        if isinstance(kernel, OSError):
            raise kernel
        return kernel

    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(clock, "kernel_clock", answer)
    [found] = examine("clock", made_up())
    assert (found.status, words in found.found) == (status, True), found


def test_the_clock_of_this_kernel():
    with suppress(OSError):  # a container may not be allowed to ask
        assert clock.kernel_clock()[1] >= 0


def test_the_kernels_clock_is_laid_out_as_in_the_c_library():
    """The status is the fifth word, counted from 0 (bits/timex.h), and the buffer is longer than the structure."""
    assert clock.TIMEX.size == 5 * ctypes.sizeof(ctypes.c_long) + ctypes.sizeof(ctypes.c_int)
    assert clock.TIMEX_BYTES >= 208


def test_fabric_manager(short_path):
    write(short_path, "proc/7/comm", "nv-fabricmanage\n")
    run = short_path / "root/run/nvidia-fabricmanager"
    run.mkdir(parents=True)
    roots = ("/nonexistent", str(short_path / "root"))
    assert fabric_manager.read_trace(short_path, roots) == "process 7"
    (short_path / "proc/7/comm").unlink()
    with closing(listen(run / "socket")):
        assert fabric_manager.read_trace(short_path, roots) == str(run / "socket")
    (run / "socket").unlink()
    assert fabric_manager.read_trace(short_path, roots) == ""


def test_mps(short_path, monkeypatch):
    up, down = short_path / "m/nvidia.com/gpu", short_path / "m/nvidia.com/old"
    for each in (up, down):
        (each / "pipe").mkdir(parents=True)
    listen(down / "pipe/control").close()
    (short_path / "proc").mkdir()
    with closing(listen(up / "pipe/control")):
        monkeypatch.setattr(mps, "root_here", {"/on-the-host": short_path / "m"}.__getitem__)
        seen = mps.read_mps("/on-the-host", short_path)
    assert seen.directories == {str(up): True, str(down): False}
    assert mps.read_mps("", short_path).directories == {}


RIGHTS = (
    kubernetes_api.Right("get", "nodes", "--node-taint", name="n"),
    kubernetes_api.Right("patch", "nodes", "--node-condition", "status", "", "n"),
)


class Reviewer:
    """Answers access reviews on 127.0.0.1, as the API server does: `allowed` has the verbs on resources that it grants."""

    def __init__(self, allowed, code=201):
        self.allowed, self.code, self.asked = allowed, code, []

    async def answer(self, reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.decode().split("\r\n")
            length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length"))
            review = json.loads(await reader.readexactly(length))
            asked = review["spec"]["resourceAttributes"]
            self.asked.append((lines[0], asked))
            content: dict[str, object] = {"status": {"allowed": (asked["verb"], asked["resource"]) in self.allowed}}
            if self.code != 201:
                content = {"kind": "Status", "code": self.code, "message": "no"}
            body = json.dumps(content).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (self.code, len(body), body))
            try:
                await writer.drain()
            except ConnectionError:
                return

    def kubeconfig(self, directory, port):
        content = {
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}", **_INSECURE}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "users": [{"name": "me", "user": {"token": "t"}}],
        }
        return str(write(directory, "kubeconfig", json.dumps(content)))


@pytest.mark.parametrize(
    ("allowed", "code", "status", "words"),
    [
        ({("get", "nodes"), ("patch", "nodes")}, 201, OK, "answers in"),
        ({("get", "nodes")}, 201, FAILED, "--node-condition: our account may not patch on nodes/status"),
        (set(), 403, FAILED, "needed by --node-taint, --node-condition: "),
    ],
)
async def test_the_api_server_names_the_missing_rights(tmp_path, allowed, code, status, words):
    reviewer = Reviewer(allowed, code)

    async def serve(reader, writer):
        try:
            await reviewer.answer(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        kubeconfig = reviewer.kubeconfig(tmp_path, server.sockets[0].getsockname()[1])
        [found] = await to_thread.run_sync(kubernetes_api.look, kubeconfig, RIGHTS)
    assert (found.status, words in found.found) == (status, True), found
    line, first = reviewer.asked[0]
    assert line == "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews HTTP/1.1"
    assert first == {"verb": "get", "resource": "nodes", "name": "n"}
    if code == 201:
        assert reviewer.asked[1][1] == {"verb": "patch", "resource": "nodes", "subresource": "status", "name": "n"}
    else:
        assert "selfsubjectaccessreviews" in found.found


def test_an_api_server_that_is_away(tmp_path):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        [found] = kubernetes_api.look(Reviewer(set()).kubeconfig(tmp_path, taken.getsockname()[1]), RIGHTS)
    assert (found.status, "cannot be reached" in found.found) == (FAILED, True)


@pytest.mark.parametrize(("pipe", "words"), [(True, "is a named pipe"), (False, "No such file")])
def test_an_unusable_kubeconfig(tmp_path, pipe, words):
    file = tmp_path / "kubeconfig"
    if pipe:
        os.mkfifo(file)
    [found] = kubernetes_api.look(str(file), RIGHTS)
    assert (found.status, f"--kubeconfig {file}: {words}" in found.found) == (FAILED, True)
