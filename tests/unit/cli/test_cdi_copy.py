"""`gpu-plugin cdi generate --root`: the specification of a node from a copy of its files."""

import json

import pytest

from gpu_plugin.containers.cdi.host_files import DeviceFile, Kind, Seen
from gpu_plugin.containers.driver_root import tegra as driver_root_tegra
from gpu_plugin.containers.driver_root.tegra import DIRECTORY
from gpu_plugin.simulation import driver_files
from tests.device_nodes import device
from tests.unit.containers.driver_root.installed import Root

VERSION = "550.54.15"
WSL = "usr/lib/wsl"
STORE = f"{WSL}/drivers/nv_dispi.inf_amd64_1f"


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path / "node")


@pytest.fixture
def node(root):
    """A copy of a node with one GPU."""
    driver_files.make(root.path, VERSION)
    add_gpu(root)
    root.write(
        "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Tue\n".encode()
    )
    devices(root)
    return root


def devices(root):
    """The device nodes that a CUDA program on one GPU needs."""
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        device(root.path / "dev" / name)


def add_gpu(root, model="NVIDIA H100 80GB HBM3"):
    said = f"Model: \t {model}\nGPU UUID: \t GPU-a\nBus Location: \t 0000:1b:00.0\nDevice Minor: \t 0\n"
    root.write("proc/driver/nvidia/gpus/0000:1b:00.0/information", said.encode())


def wsl(root):
    root.library(f"{WSL}/lib/libdxcore.so", "libdxcore.so")
    root.library(f"{WSL}/lib/libnvidia-ml.so.1", "libnvidia-ml.so.1")
    for name in ("libcuda.so.1.1", "libcuda_loader.so"):
        root.library(f"{STORE}/{name}", "libcuda.so.1")
    device(root.path / "dev/dxg")


def tegra(root):
    root.write("etc/nv_tegra_release")
    root.write(f"{DIRECTORY}/devices.csv", b"dev, /dev/null\n")
    root.write(f"{DIRECTORY}/drivers.csv", b"lib, /usr/lib/libcuda.so.1.1\n")
    root.library("usr/lib/libcuda.so.1.1", "libcuda.so.1", "aarch64")


def names(text):
    return [device["name"] for device in json.loads(text)["devices"]]


def host_paths(text):
    return [mount["hostPath"] for mount in json.loads(text)["containerEdits"]["mounts"]]


def test_a_copy_of_a_node_gives_its_specification(cdi, node):
    status, text, error = cdi("generate", "--root", node)
    assert (status, error) == (0, "")
    assert names(text) == ["GPU-a", "0", "all"]
    assert str(node) not in text  # paths are paths of the host
    assert f"/usr/lib64/libcuda.so.{VERSION}" in host_paths(text)


def test_a_copy_may_lie_where_users_may_write(cdi, node):
    node.path.parent.chmod(0o777)
    assert cdi("generate", "--root", node)[0] == 0


def test_what_is_made_of_a_copy_can_be_judged_against_it(cdi, node):
    cdi("generate", "--root", node, "--output", node.path / "etc/cdi")
    assert cdi("validate", "--root", node, "--host-paths")[0] == 0
    (node.path / f"usr/lib64/libcuda.so.{VERSION}").unlink()
    status, text, _ = cdi("validate", "--root", f"{node}/", "--host-paths")
    assert status == 2
    assert f": /usr/lib64/libcuda.so.{VERSION} does not exist below {node}" in text


@pytest.mark.parametrize("whole", [True, False], ids=["in a copy of the node", "copied alone"])
def test_paths_of_a_driver_root_of_its_own_are_the_nodes(cdi, tmp_path, whole):
    root = Root(tmp_path / "node")
    driver = Root(root.path / "run/nvidia/driver") if whole else root
    driver_files.make(driver.path, VERSION)
    add_gpu(root)
    devices(driver)
    hook = driver.write("usr/bin/nvidia-cdi-hook")
    hook.chmod(0o755)
    called = "/run/nvidia/driver/usr/bin/nvidia-cdi-hook"
    arguments = ("--nvidia-driver-root", "/run/nvidia/driver", "--nvidia-cdi-hook-path", called)
    status, text, error = cdi("generate", "--root", root, *arguments)
    assert (status, error) == (0, "")
    assert {path.rpartition("/usr/")[0] for path in host_paths(text)} == {"/run/nvidia/driver"}
    made = json.loads(text)
    [nodes] = [each["containerEdits"]["deviceNodes"] for each in made["devices"] if each["name"] == "0"]
    assert [each["hostPath"] for each in nodes] == ["/run/nvidia/driver/dev/nvidia0"]
    assert {each["path"] for each in made["containerEdits"]["hooks"]} == {called}
    assert str(tmp_path) not in text


def test_device_nodes_have_the_paths_of_the_root_where_they_are(cdi, root):
    driver = Root(root.path / "home/kubernetes/bin/nvidia")
    driver.driver("lib64", VERSION)
    driver.write("bin/nvidia-smi")
    add_gpu(root)
    devices(root)
    status, text, error = cdi("generate", "--root", root, "--nvidia-driver-root", "/home/kubernetes/bin/nvidia")
    assert (status, error) == (0, "")
    [gpu] = [each for each in json.loads(text)["devices"] if each["name"] == "0"]
    assert [each.get("hostPath", each["path"]) for each in gpu["containerEdits"]["deviceNodes"]] == ["/dev/nvidia0"]
    assert f"/home/kubernetes/bin/nvidia/lib64/libcuda.so.{VERSION}" in host_paths(text)


def test_a_hook_is_looked_for_in_the_copy(cdi, node):
    status, text, error = cdi("generate", "--root", node, "--nvidia-cdi-hook-path", "/bin/sh")
    assert status == 0
    assert "hooks" not in text
    assert f"no program {node}/bin/sh" in error


def test_sentences_name_the_copy(cdi, node):
    (node.path / "dev/nvidia0").unlink()
    status, text, error = cdi("generate", "--root", node)
    assert (status, text) == (1, "")
    assert f"under {node}: its device node /dev/nvidia0" in error
    (node.path / f"usr/lib64/libcuda.so.{VERSION}").unlink()
    for arguments in ((), ("--simulate", "h200")):
        status, _, error = cdi("generate", "--root", f"{node}/", *arguments)
        assert status == 1
        assert f"the driver root {node} has" in error


def test_a_wsl_node_is_known_by_its_files(cdi, root):
    wsl(root)
    status, text, _ = cdi("generate", "--root", root)
    assert status == 0
    assert names(text) == ["all", "0"]
    assert f"/{STORE}/libcuda.so.1.1" in host_paths(text)
    (root.path / "dev/dxg").unlink()
    root.write("dev/dxg")
    status, _, error = cdi("generate", "--root", root)
    assert status == 1
    assert f"there is no device /dev/dxg under {root}" in error


def test_a_wsl_node_without_nvml_has_no_gpu(cdi, root):
    wsl(root)
    library = root.path / f"{WSL}/lib/libnvidia-ml.so.1"
    library.unlink()
    library.symlink_to("/etc/hostname")  # which is not in the copy
    status, text, error = cdi("generate", "--root", root)
    assert (status, text) == (1, "")
    assert f"--root: {root} is a copy of a WSL node and has no libnvidia-ml.so.1" in error


@pytest.fixture
def nodes(root, monkeypatch):
    """Device nodes of a Tegra by their path as this process sees it: in the copy, and another here."""
    found = {f"{root}/dev/null": DeviceFile(10, 124), "/dev/null": DeviceFile(1, 3)}

    def device_file(at: str, path: str) -> tuple[Seen, DeviceFile | None]:
        node = found.get(f"{at}{path}")
        return (Seen(path, Kind.MISSING) if node is None else Seen(path, Kind.DEVICE, path)), node

    monkeypatch.setattr(driver_root_tegra, "device_file", device_file)
    return found


def test_a_tegra_is_known_by_its_files_and_has_the_copys_device_nodes(cdi, root, nodes):
    tegra(root)
    status, text, error = cdi("generate", "--root", root)
    assert (status, error) == (0, "")
    assert names(text) == ["tegra", "0", "all"]
    assert "/usr/lib/libcuda.so.1.1" in host_paths(text)
    [node] = json.loads(text)["devices"][0]["containerEdits"]["deviceNodes"]
    assert (node["path"], node["major"], node["minor"]) == ("/dev/null", 10, 124)
    del nodes[f"{root}/dev/null"]
    status, text, error = cdi("generate", "--root", root)
    assert (status, text) == (1, "")
    assert f"no device node that the lists of Linux for Tegra name exists under {root}" in error


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("prepare", "strategy", "kind"),
    [
        ((wsl, tegra), "auto", "all"),
        ((wsl, tegra), "tegra", "tegra"),
        ((wsl,), "nvml", "all"),
        ((tegra,), "nvml", ""),
        ((tegra, add_gpu), "auto", "GPU-a"),
        ((tegra, lambda root: add_gpu(root, "NVIDIA Thor")), "auto", "tegra"),
        ((), "auto", ""),
    ],
)
def test_the_platform_is_the_one_that_the_node_would_choose(cdi, node, prepare, strategy, kind):
    gpus = node.path / "proc/driver/nvidia/gpus"
    (gpus / "0000:1b:00.0/information").unlink()
    (gpus / "0000:1b:00.0").rmdir()
    gpus.rmdir()
    for each in prepare:
        each(node)
    status, text, error = cdi("generate", "--root", node, "--device-discovery-strategy", strategy)
    if kind:
        assert names(text)[0] == kind
    else:
        assert (status, text) == (1, "")
        assert f"{gpus}: No such file or directory; a copy of a node needs proc/driver/nvidia/gpus" in error


def test_mig_devices_are_said_to_be_left_out(cdi, node):
    node.write("proc/driver/nvidia-caps/mig-minors", b"gpu0/gi1/access 12\n")
    assert cdi("generate", "--root", node)[2] == ""
    node.write("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access")
    status, text, error = cdi("generate", "--root", node)
    assert (status, names(text)) == (0, ["GPU-a", "0", "all"])
    [line] = error.splitlines()
    assert "MIG devices are left out" in line
    assert "on the node itself" in line


def test_a_strange_information_file_is_no_gpu(cdi, node):
    node.write(
        "proc/driver/nvidia/gpus/0000:zz:00.0/information", b"GPU UUID: GPU-b c\nBus Location: \xff\nDevice Minor: 1\n"
    )
    node.write(
        "proc/driver/nvidia/gpus/0000:1b:00.0/information", b"GPU UUID: GPU-a\nBus Location: zz\nDevice Minor: 0\n"
    )
    status, text, _ = cdi("generate", "--root", node)
    assert (status, names(text)) == (0, ["GPU-a", "0", "all"])
