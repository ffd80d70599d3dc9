"""The input of specifications, and the changes after which they are built again."""

import os
import shutil

import msgspec
import pytest

from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.spec import DeviceNode, Edits, Hook, Mount, SpecDevice, made
from gpu_plugin.containers.cdi_files.source import Request, SpecSource
from gpu_plugin.containers.driver_root import elf
from gpu_plugin.containers.driver_root.search import Search
from gpu_plugin.devices.node import Gpu, MigDevice
from gpu_plugin.simulation import driver_files
from tests.unit.containers.cdi_files.specs import GPU_FILE, spec

VERSION = "550.54.15"
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm")


class Host:
    def __init__(self):
        self.nodes = {path: DeviceFile(195, at) for at, path in enumerate((*CONTROL, "/dev/nvidia0", "/dev/nvidia1"))}

    def devices(self, pci_bus_ids):
        list(pci_bus_ids)
        return HostDevices(dict(self.nodes))


@pytest.fixture
def root(tmp_path):
    return driver_files.make(tmp_path / "root", VERSION)


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def source(host, root):
    return SpecSource(host, lambda: [(str(root), "")])


def request(*gpus, version=VERSION, **options):
    return Request(gpus or (Gpu("GPU-a", 0, minor=0),), version, CdiOptions(**options))


def names(built):
    return [device.name for device in built.specs[GPU_FILE].devices]


def test_the_very_same_object_comes_back_where_nothing_changes_and_nothing_is_searched(source, host, monkeypatch):
    first = source.build(request())
    calls: list[str] = []

    def counted(call, real):
        def count(*arguments, **more):
            calls.append(call)
            return real(*arguments, **more)

        return count

    for module, call in ((os, "scandir"), (os, "stat"), (os, "lstat"), (os, "open"), (elf, "read")):
        monkeypatch.setattr(module, call, counted(call, getattr(module, call)))
    for _ in range(5):
        assert source.build(request()) is first
    assert (calls.count("scandir"), calls.count("read")) == (0, 0)
    assert (
        calls.count("stat") + calls.count("lstat") <= 5 * 150
    )  # one for each directory in which a driver may lie, or file
    assert calls.count("open") <= 5 * 300  # a missing directory is looked for along its path
    assert source._searches[Search].searches == 1


def test_what_changes_is_followed(source, host, root):
    seen = [source.build(request()).specs[GPU_FILE]]

    def build(asked):
        made = source.build(asked).specs[GPU_FILE]
        assert made not in seen
        seen.append(made)

    two = (Gpu("GPU-a", 0, minor=0), Gpu("GPU-b", 1, minor=1))
    build(request(*two))  # hot-plug
    host.nodes |= {f"/dev/nvidia-caps/nvidia-cap{at}": DeviceFile(241, at) for at in (12, 13)}
    cut = Gpu(
        "GPU-a",
        0,
        minor=0,
        mig_enabled=True,
        mig_devices=(MigDevice("MIG-x", 0, 1, 0, "1g.10gb", gpu_instance_cap=12, compute_instance_cap=13),),
    )
    build(request(cut))  # partitioned
    build(request(dev_root="/elsewhere"))  # settings
    host.nodes["/dev/nvidia-uvm-tools"] = DeviceFile(238, 1)
    build(request())  # the host's device nodes
    shutil.rmtree(root)
    driver_files.make(root, "560.28.03")
    build(request(version="560.28.03"))  # the driver
    assert "560.28.03" in str(seen[-1])


def test_a_driver_that_runs_without_its_libraries_is_told_and_heals(source, root):
    assert names(source.build(request())) == ["GPU-a", "0", "all"]
    broken = source.build(request(version="560.28.03"))
    assert GPU_FILE not in broken.specs
    assert "560.28.03" in broken.trouble
    driver_files.make(root, "560.28.03")
    assert source.build(request(version="560.28.03")).trouble == ""


def test_driver_roots_that_cannot_be_made_are_asked_for_again(host, root):
    answers = [OSError(28, "No space left on device", "/state"), [(str(root), "")]]

    def roots():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    source = SpecSource(host, roots)
    with pytest.raises(OSError, match="No space left"):
        source.build(request())
    assert names(source.build(request())) == ["GPU-a", "0", "all"]


def test_a_hook_that_is_not_on_the_host_is_done_without_and_said_until_it_comes(source, root):
    asked = request(hook="/usr/bin/nvidia-cdi-hook")
    for _ in range(2):
        built = source.build(asked)
        assert built.specs[GPU_FILE].container_edits.hooks == ()
        assert [each for each in built.complaints if "--nvidia-cdi-hook-path" in each]
    program = root / "usr/bin/nvidia-cdi-hook"
    program.write_text("")
    assert source.build(asked).specs[GPU_FILE].container_edits.hooks == ()  # not executable
    program.chmod(0o755)
    built = source.build(asked)
    assert {hook.path for hook in built.specs[GPU_FILE].container_edits.hooks} == {"/usr/bin/nvidia-cdi-hook"}
    assert not [each for each in built.complaints if "--nvidia-cdi-hook-path" in each]


def node(path, major=0, minor=0, host_path=""):
    return Edits(device_nodes=(DeviceNode(path=path, major=major, minor=minor, host_path=host_path),))


def of(edits, common=None):
    return made("a.b/gpu", (SpecDevice(name="GPU-a", container_edits=edits),), common or Edits())


def test_a_specification_holds_where_all_that_it_names_is_below_the_root(source, root):
    here = root.parent / "outside"
    here.write_text("")
    assert source.holds(spec(mount=f"/usr/lib64/libcuda.so.{VERSION}", GPU_a=("/dev/null",)))
    assert not source.holds(
        spec(mount=str(here), GPU_a=("/dev/null",))
    )  # in a container this is another file than the host's
    on_host = SpecSource(source._host, lambda: ((str(root), str(root)),))
    assert on_host.holds(spec(mount=str(here), GPU_a=("/dev/null",)))
    assert not source.holds(spec(mount=f"/usr/lib64/libcuda.so.{VERSION}", GPU_a=("/dev/nvidia-none",)))
    assert not source.holds(spec(mount="/usr/lib64/libcuda.so.1.2.3", GPU_a=("/dev/null",)))
    assert not source.holds(of(node("/dev/null", host_path="/dev/nvidia-none")))
    assert not source.holds(of(node("/dev/null"), Edits(hooks=(Hook(hook_name="prestart", path="/no/such/hook"),))))
    assert not source.holds(of(Edits(mounts=(Mount(host_path="/no\0such", container_path="/x"),))))


def test_a_specification_holds_where_the_numbers_of_its_device_nodes_do(source):
    assert source.holds(of(node("/dev/null", 1, 3)))
    assert not source.holds(of(node("/dev/null", 1, 5)))
    assert not source.holds(of(node("/dev/null", 2, 3)))
    assert source.holds(of(node("/dev/x", 1, 3, host_path="/dev/null")))
    assert not source.holds(
        msgspec.structs.replace(of(node("/dev/null", 1, 3)), container_edits=node("/dev/zero", 1, 3))
    )


def test_device_nodes_are_looked_for_below_the_driver_root_as_the_host_calls_it(host, root):
    source = SpecSource(host, lambda: [(str(root), "/run/nvidia/driver")])
    (root / "tool").write_text("")
    assert source.holds(spec(mount="/run/nvidia/driver/tool", GPU_a=("/dev/null",)))
    assert not source.holds(spec(mount="/run/nvidia/drivers/tool", GPU_a=("/dev/null",)))
