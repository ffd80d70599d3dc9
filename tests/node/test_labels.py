"""Labels of a real daemon on a simulated node: written, followed, moved with the settings, and taken back."""

import anyio.to_thread

from gpu_plugin.runtime.control import request
from tests.node.daemon import healthy
from tests.node.forked import run

SHARED = "\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"


def labels(features):
    lines = (features / "gfd").read_text().splitlines()
    return dict(line.removeprefix("nvidia.com/").split("=", 1) for line in lines)


def cleanup(daemon, features):
    here = ("--state-dir", daemon.state, "--cdi-dir", daemon.specs, "--device-plugin-dir", daemon.directory)
    done = run("cleanup", *here, "--features-dir", features)
    done.check_returncode()
    return done.stdout


async def test_the_file_follows_the_settings_and_goes_with_them(kubelet, daemon, directory):
    features, file = directory / "features.d", directory / "config.yaml"
    features.mkdir()

    def configure(way, more=""):
        text = f"version: v1\nflags: {{nodeLabels: {way}, featuresDir: {features}}}{more}\n"
        (directory / "new").write_text(text)
        (directory / "new").replace(file)

    configure("file")
    daemon.start("--config-file", str(file))
    await daemon._holds(features / "gfd", "nvidia.com/gpu.present=true", 10)
    await kubelet.wait_for(healthy(kubelet, 8))
    told = labels(features)
    assert (told["gpu.product"], told["gpu.count"], told["gpu.replicas"]) == ("NVIDIA-H100-80GB-HBM3", "8", "1")
    assert (told["gpu.family"], told["gpu.memory"], told["gpu.mode"]) == ("hopper", "81559", "compute")
    assert (told["cuda.driver-version.full"], told["cuda.runtime-version.full"]) == ("580.159.04", "13.0")
    assert told["gpu.machine"] == "Simulated-Node"

    configure("file", SHARED)
    await daemon._holds(features / "gfd", "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3-SHARED", 10)
    assert (labels(features)["gpu.replicas"], labels(features)["gpu.sharing-strategy"]) == ("4", "time-slicing")

    configure("none", SHARED)
    await daemon.said("the file of labels is removed")
    assert list(features.iterdir()) == []
    await kubelet.wait_for(healthy(kubelet, 32))


async def test_a_directory_that_is_not_there_keeps_nothing_from_being_served_and_cleanup_takes_the_file(
    kubelet, daemon, directory
):
    features = directory / "features.d"
    flags = ("--node-labels", "file", "--features-dir", str(features))
    daemon.start(*flags)
    await kubelet.wait_for(healthy(kubelet, 8))
    await daemon.said("no such directory")
    assert "no such directory" in (await anyio.to_thread.run_sync(request, daemon.state, "status"))["labels"]["trouble"]
    assert (await daemon.stop())[0] == 0
    features.mkdir()
    daemon.start(*flags)
    await daemon._holds(features / "gfd", "nvidia.com/gpu.count=8", 10)
    assert (await daemon.stop())[0] == 0
    assert labels(features)["gpu.count"] == "8", "a restart is no reason to take labels away"

    assert f"{features / 'gfd'}: removed" in cleanup(daemon, features)
    assert list(features.iterdir()) == []
