"""The real process finds GPUs that NVML does not list (WSL, Tegra), by the files under a root."""

import ctypes
from pathlib import Path

import pytest

from gpu_plugin.containers.cdi.spec import from_json
from gpu_plugin.containers.driver_root.tegra import DIRECTORY as L4T_LISTS
from gpu_plugin.simulation.driver_files import shared_library
from tests.device_nodes import device
from tests.node.daemon import GPU, healthy, ids
from tests.unit.nvml.platforms.nvml_library import nvml_library

TEGRA_CUDA = "usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1"
WINDOWS_STORE = "usr/lib/wsl/drivers/nv_dispi.inf_amd64_0373d825005116d0"


def _library() -> bool:
    """Return True if the loader finds an NVML library on this machine."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


WITHOUT_LIBRARY = pytest.mark.skipif(
    _library(), reason="this machine has an NVML library, so it is no Tegra without one"
)


@pytest.fixture
def root(directory) -> Path:
    """The root that a driver is looked for under; empty."""
    path = Path(directory / "root")
    path.mkdir()
    return path


@pytest.fixture
def platform(daemon, root):
    """Start the daemon on the files under the root."""
    daemon.profile = ""

    def start(*flags: str) -> None:
        daemon.start("--driver-root-ctr-path", str(root), *flags)

    return start


def put(root: Path, path: str, content: bytes = b"") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def tegra(root: Path) -> None:
    put(root, f"{L4T_LISTS}/devices.csv", b"dev, /dev/null\n")
    put(root, f"{L4T_LISTS}/drivers.csv", f"lib, /{TEGRA_CUDA}\n".encode())
    put(root, TEGRA_CUDA, shared_library("libcuda.so.1", "aarch64"))
    put(root, "etc/nv_tegra_release", b"# R36 (release), REVISION: 4.3\n")


def windows(root: Path, gpus: int = 1) -> None:
    for name in ("libcuda.so.1.1", "libcuda_loader.so"):
        put(root, f"{WINDOWS_STORE}/{name}", shared_library("libcuda.so.1", "x86_64"))
    device(root / "dev/dxg")
    put(root, "usr/lib/wsl/lib/libnvidia-ml.so.1", nvml_library(gpus))
    put(root, "usr/lib/wsl/lib/libdxcore.so", shared_library("libdxcore.so", "x86_64"))


async def visible(kubelet, pod: str) -> tuple[str, list[str]]:
    """Admit a pod with the one device. Return its visible devices, and its device nodes other than NVIDIA's."""
    response = (await kubelet.admit(pod, {GPU: 1})).allocations[0].response
    nodes = [
        device.container_path for device in response.devices if not device.container_path.startswith("/dev/nvidia")
    ]
    return response.envs["NVIDIA_VISIBLE_DEVICES"], nodes


@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=WITHOUT_LIBRARY), "tegra"])
async def test_a_tegra_system_is_one_device(kubelet, daemon, platform, root, strategy):
    tegra(root)
    platform("--device-discovery-strategy", strategy, "--pass-device-specs")
    await kubelet.wait_for(healthy(kubelet, 1))
    assert ids(kubelet) == ["tegra"]
    assert kubelet.resources[GPU].numa == {"tegra": ()}
    assert await visible(kubelet, "pod") == ("tegra", [])
    status, seconds = await daemon.stop()
    assert (status, seconds < 1) == (0, True)
    assert "Traceback" not in daemon.log.read_text()


@pytest.mark.parametrize("strategy", ["auto", "nvml"])
async def test_all_gpus_of_a_windows_host_are_one_device(kubelet, daemon, platform, root, strategy):
    windows(root)
    platform("--device-discovery-strategy", strategy, "--pass-device-specs")
    await kubelet.wait_for(healthy(kubelet, 1))
    assert ids(kubelet) == ["all"]
    assert await visible(kubelet, "pod") == ("all", ["/dev/dxg"])
    await kubelet.restart()
    await kubelet.wait_for(healthy(kubelet, 1))
    status, seconds = await daemon.stop()
    assert (status, seconds < 1) == (0, True)
    log = daemon.log.read_text()
    assert f"platform is wsl: {root}/usr/lib/wsl/lib/libdxcore.so" in log
    assert "Traceback" not in log


@WITHOUT_LIBRARY
@pytest.mark.parametrize(
    ("appear", "device", "node", "cuda"),
    [(tegra, "tegra", "/dev/null", TEGRA_CUDA), (windows, "all", "/dev/dxg", f"{WINDOWS_STORE}/libcuda_loader.so")],
)
async def test_with_cdi_and_without_a_library_it_waits_and_serves_what_comes(
    kubelet, daemon, platform, root, appear, device, node, cuda
):
    platform("--fail-on-init-error=false", "--device-list-strategy=cdi-cri")
    await daemon.said("looking again in")
    assert "no libnvidia-ml.so.1" in daemon.log.read_text()
    assert GPU not in kubelet.registrations
    appear(root)
    await kubelet.wait_for(healthy(kubelet, 1), timeout=15)
    assert ids(kubelet) == [device]
    allocation = (await kubelet.admit("pod", {GPU: 1})).allocations[0]
    assert allocation.response.cdi_devices == (f"k8s.device-plugin.nvidia.com/gpu={device}",)
    spec = from_json((daemon.specs / "k8s.device-plugin.nvidia.com-gpu.json").read_bytes())
    (given,) = (each for each in spec.devices if each.name == device)
    assert [each.path for each in given.container_edits.device_nodes] == [node]
    mounts = {mount.container_path: mount.host_path for mount in spec.container_edits.mounts}
    assert mounts["/usr/lib64/libcuda.so.1"] == f"/{cuda}"
    status, _ = await daemon.stop()
    assert status == 0
