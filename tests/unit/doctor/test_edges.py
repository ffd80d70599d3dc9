"""What is gathered, of made-up roots and of sockets that somebody answers, or does not."""

import asyncio
import ctypes
import errno
import json
import os
import socket
import stat
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from anyio import to_thread

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.doctor.edges import api, host, kubelet, sockets
from gpu_plugin.doctor.edges import clock as clocks
from gpu_plugin.doctor.edges.directories import directory
from gpu_plugin.doctor.edges.driver import kernel_module
from gpu_plugin.doctor.edges.process import process, processes
from gpu_plugin.doctor.facts import KernelModule, Right
from tests.unit.cluster.api_server import _INSECURE

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


def test_process(tmp_path):
    status = "Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\nCapEff:\t00000000a80425fb\n"
    write(tmp_path, "proc/self/status", status)
    write(tmp_path, "proc/self/attr/current", "system_u:system_r:container_t:s0\0")
    write(tmp_path, "proc/1/comm", "gpu-plugin\n")
    write(tmp_path, "sys/fs/selinux/enforce", "1")
    seen = process(tmp_path / "proc", tmp_path / "sys", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (seen.uid, seen.capabilities, seen.seccomp, seen.no_new_privileges) == (os.geteuid(), 0xA80425FB, 2, True)
    assert (seen.selinux, seen.label) == ("enforcing", "system_u:system_r:container_t:s0")
    assert (seen.contained, seen.host_processes) == (True, False)
    write(tmp_path, "proc/1/comm", "systemd\n")
    assert process(tmp_path / "proc", tmp_path / "sys", {"KUBERNETES_SERVICE_HOST": "1"}).host_processes


def test_this_process():
    assert process().uid == os.geteuid()


def test_processes_by_name(tmp_path):
    for pid, name in ((7, "nvidia-cuda-mps"), (8, "nvidia-cuda-mps"), (9, "bash")):
        write(tmp_path, f"{pid}/comm", f"{name}\n")
    (tmp_path / "11").mkdir()  # gone meanwhile
    assert processes(("nvidia-cuda-mps",), tmp_path) == ((7, "nvidia-cuda-mps"), (8, "nvidia-cuda-mps"))


def test_kernel_module(tmp_path):
    assert kernel_module(tmp_path / "p", tmp_path / "s") == KernelModule(False)
    write(tmp_path, "s/module/nouveau/refcnt")
    assert kernel_module(tmp_path / "p", tmp_path / "s") == KernelModule(False, nouveau=True)
    write(tmp_path, "s/module/nvidia/version", "575.57.08\n")
    assert kernel_module(tmp_path / "p", tmp_path / "s").version == "575.57.08"
    write(tmp_path, "p/driver/nvidia/version", VERSION)
    assert kernel_module(tmp_path / "p", tmp_path / "s") == KernelModule(True, "580.95.05", True)


def test_pci(tmp_path):
    devices = tmp_path / "bus/pci/devices"
    for name, vendor, kind in (
        ("0000:1b:00.0", "0x10de", "0x030200"),
        ("0000:1c:00.0", "0x10de", "0x030000"),
        ("0000:1b:00.1", "0x10de", "0x040300"),  # its sound
        ("0000:c1:00.0", "0x10de", "0x068000"),
        ("0000:00:02.0", "0x8086", "0x030000"),
    ):
        write(devices, f"{name}/vendor", f"{vendor}\n")
        write(devices, f"{name}/class", f"{kind}\n")
    (devices / "0000:ff:00.0").mkdir()  # gone meanwhile
    drivers = tmp_path / "bus/pci/drivers/vfio-pci"
    drivers.mkdir(parents=True)
    (devices / "0000:1c:00.0/driver").symlink_to(drivers)
    seen = host.pci(tmp_path, (str(tmp_path / "other"), str(tmp_path)))
    assert not seen.dxg
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert host.pci(tmp_path, (str(tmp_path / "other"), str(tmp_path))).dxg
    assert seen.gpus == {"0000:1b:00.0": "", "0000:1c:00.0": "vfio-pci"}
    assert seen.switches == {"0000:c1:00.0": ""}


def test_majors_are_those_of_character_devices(tmp_path):
    write(
        tmp_path,
        "devices",
        "Character devices:\n  1 mem\n195 nvidia-frontend\n511 nvidia-uvm\n\nBlock devices:\n259 blkext\n",
    )
    assert host.majors(tmp_path) == {"mem": 1, "nvidia-frontend": 195, "nvidia-uvm": 511}


def test_device_nodes(tmp_path):
    """A link to a real device stands for one: to make nodes takes root."""
    dev = tmp_path / "dev"
    dev.mkdir()
    (dev / "nvidiactl").symlink_to("/dev/null")
    (dev / "nvidia0").write_text("")
    opened = host.device_node("/dev/nvidiactl", str(tmp_path))
    assert (opened.there, opened.major, opened.minor, opened.error) == (True, 1, 3, 0)
    assert opened.mode == stat.S_IMODE(Path("/dev/null").stat().st_mode)
    assert host.device_node("/dev/nvidia0", str(tmp_path)).major is None
    assert host.device_node("/dev/nvidia0", str(tmp_path)).there
    assert not host.device_node("/dev/nvidia1", str(tmp_path)).there


def test_a_device_node_that_cannot_be_opened(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").symlink_to("/dev/null")
    monkeypatch.setattr(os, "open", refuse)
    refused = host.device_node("/dev/nvidia0", str(tmp_path))
    assert (refused.error, refused.reason) == (errno.EPERM, "Operation not permitted")


def test_imex_channels(tmp_path):
    write(tmp_path, "dev/nvidia-caps-imex-channels/channel0")
    assert host.imex_channels((str(tmp_path), "/nonexistent")) == ("/dev/nvidia-caps-imex-channels/channel0",)


def test_directory(tmp_path):
    mounts = write(
        tmp_path,
        "mountinfo",
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"22 21 0:5 / {tmp_path}/with\\040blank rw - tmpfs tmpfs rw,size=1\n"
        "broken\n",
    )
    plain, blank = tmp_path / "plain", tmp_path / "with blank/state"
    plain.mkdir(mode=0o750)
    blank.mkdir(parents=True)
    seen = directory(str(plain), mounts)
    assert (seen.there, seen.is_directory, seen.writable, seen.removed) == (True, True, True, False)
    assert (seen.mount, seen.filesystem, seen.mode) == ("/", "ext4", 0o750)
    assert seen.free_bytes > 0
    assert directory(str(blank), mounts).filesystem == "tmpfs"
    absent = directory(str(blank / "a/b"), mounts)
    assert (absent.there, absent.is_directory, absent.writable, absent.filesystem) == (False, False, True, "tmpfs")
    assert not directory(str(mounts), mounts).is_directory
    assert not directory(str(mounts / "below"), mounts).writable
    assert directory("/proc/self", Path("/nonexistent")).filesystem == ""
    assert "too long" in directory("/" + "x" * 300, mounts).error.lower()


def test_a_directory_that_may_not_be_written(short_path):
    short_path.chmod(0o555)
    me = os.geteuid()
    if not me:
        os.seteuid(65534)  # root may write everywhere
    try:
        assert not directory(str(short_path)).writable
        assert not directory(str(short_path / "below")).writable
    finally:
        os.seteuid(me)
    short_path.chmod(0o700)


async def test_the_kubelet_answers_on_its_socket_and_keeps_nothing_of_it(short_path):
    plugins = short_path / "p"
    plugins.mkdir()
    async with StandInKubelet(plugins, pod_resources_socket=short_path / "pods.sock") as running:
        seen = await to_thread.run_sync(sockets.look, str(plugins / "kubelet.sock"), 2.0)
        assert (seen.error, seen.http2, seen.pid) == ("", True, os.getpid())
        assert seen.program
        pods = await to_thread.run_sync(kubelet.pods, str(short_path / "pods.sock"), 2.0, iter([1.0, 1.25]).__next__)
        assert (pods.trouble, pods.allocated, pods.healthy, pods.seconds) == ("", 0, {}, 0.25)
    running.check()


def test_sockets_that_are_none(short_path):
    assert not sockets.look(str(short_path / "none"), 1.0).there
    assert not sockets.look(str(write(short_path, "file")), 1.0).is_socket
    listen(short_path / "dead").close()
    assert sockets.look(str(short_path / "dead"), 1.0).error == "Connection refused"


def test_a_socket_of_something_else(short_path):
    with closing(listen(short_path / "s")) as server:

        def hang_up():
            connection, _ = server.accept()
            with closing(connection):
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=hang_up)
        answering.start()
        seen = sockets.look(str(short_path / "s"), 5.0)
        answering.join()
    assert (seen.error, seen.http2, seen.pid) == ("", False, os.getpid())


def test_a_socket_that_says_nothing(short_path):
    with closing(listen(short_path / "s")):
        seen = sockets.look(str(short_path / "s"), 0.05)
    assert (seen.error, seen.http2) == ("", False)


def test_what_else_is_in_the_kubelets_directory(short_path):
    write(short_path, "kubelet_internal_checkpoint", "{}")
    listen(short_path / "dead.sock").close()
    with ExitStack() as listening:
        for name in ("kubelet.sock", "gpu-plugin-gpu-1.sock", "nvidia-gpu.sock"):
            listening.enter_context(closing(listen(short_path / name)))
        seen = kubelet.kubelet_directory(str(short_path), str(short_path / "kubelet.sock"))
    assert (seen.checkpoint, seen.others) == (True, ("nvidia-gpu.sock",))
    assert not kubelet.kubelet_directory(str(short_path / "none"), "").directory.there


def test_pod_resources_that_are_absent_or_silent(short_path):
    ticks = iter(range(10))
    absent = kubelet.pods(str(short_path / "none.sock"), 1.0, lambda: float(next(ticks)))
    assert absent.absent
    assert absent.trouble
    with closing(listen(short_path / "s.sock")):
        silent = kubelet.pods(str(short_path / "s.sock"), 0.1, lambda: float(next(ticks)))
    assert (silent.absent, "did not answer within 0.1 s" in silent.trouble) == (False, True)


def test_clock():
    seen = clocks.clock()
    assert seen.synchronised is not None or seen.why
    assert seen.now > 1.7e9


def test_the_kernels_clock_is_laid_out_as_in_the_c_library():
    """The status is the fifth of its words, counted from 0 (bits/timex.h), and none of what follows lies beyond the buffer."""
    assert clocks._TIMEX.size == 5 * ctypes.sizeof(ctypes.c_long) + ctypes.sizeof(ctypes.c_int)
    assert clocks._TIMEX_BYTES >= 208


def test_fabric_manager(short_path):
    write(short_path, "proc/7/comm", "nv-fabricmanage\n")
    run = short_path / "root/run/nvidia-fabricmanager"
    run.mkdir(parents=True)
    roots = ("/nonexistent", str(short_path / "root"))
    assert host.fabric_manager(roots, short_path / "proc") == "process 7"
    (short_path / "proc/7/comm").unlink()
    with closing(listen(run / "socket")):
        assert host.fabric_manager(roots, short_path / "proc") == str(run / "socket")
    (run / "socket").unlink()
    assert host.fabric_manager(roots, short_path / "proc") == ""


def test_mps(short_path):
    up, down = short_path / "m/nvidia.com/gpu", short_path / "m/nvidia.com/old"
    for each in (up, down):
        (each / "pipe").mkdir(parents=True)
    listen(down / "pipe/control").close()
    (short_path / "proc").mkdir()
    with closing(listen(up / "pipe/control")):
        seen = host.mps(str(short_path / "m"), short_path / "proc")
    assert seen.directories == {str(up): True, str(down): False}
    assert host.mps("", short_path / "proc").directories == {}


RIGHTS = (
    Right("get", "nodes", "--node-taint", name="n"),
    Right("patch", "nodes", "--node-condition", "status", "", "n"),
)


class Reviewer:
    """Answers access reviews on 127.0.0.1, as the API server does: allowed are verbs on resources that it is told."""

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


@pytest.mark.parametrize(("code", "missing", "trouble"), [(201, RIGHTS[1:], ""), (403, (), "selfsubjectaccessreviews")])
async def test_the_api_server_says_what_we_may(tmp_path, code, missing, trouble):
    reviewer = Reviewer({("get", "nodes")}, code)

    async def serve(reader, writer):
        try:
            await reviewer.answer(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        found = await api.rights(reviewer.kubeconfig(tmp_path, port), RIGHTS, iter([0.0, 0.5]).__next__)
    assert (found.missing, trouble in found.trouble, found.seconds) == (missing, True, 0.5)
    line, first = reviewer.asked[0]
    assert line == "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews HTTP/1.1"
    assert first == {"verb": "get", "resource": "nodes", "name": "n"}
    if code == 201:
        assert found.server == f"http://127.0.0.1:{port}"
        assert reviewer.asked[1][1] == {"verb": "patch", "resource": "nodes", "subresource": "status", "name": "n"}


async def test_an_api_server_that_is_away(tmp_path):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        kubeconfig = Reviewer(set()).kubeconfig(tmp_path, taken.getsockname()[1])
        found = await api.rights(kubeconfig, RIGHTS, iter([0.0, 0.5]).__next__)
    assert "cannot be reached" in found.trouble
    assert (found.asked, found.missing) == (RIGHTS, ())


@pytest.mark.parametrize(("what", "trouble"), [("a pipe", "is a named pipe"), ("nothing", "No such file")])
async def test_a_kubeconfig_that_is_none_is_told_as_what_it_is(tmp_path, what, trouble):
    file = tmp_path / "kubeconfig"
    if what == "a pipe":
        os.mkfifo(file)
    found = await api.rights(str(file), RIGHTS, iter([0.0, 0.5]).__next__)
    assert found.trouble.startswith(f"--kubeconfig {file}: {trouble}")
    assert (found.asked, found.missing) == (RIGHTS, ())
