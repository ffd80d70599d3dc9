"""The node's label chooses the configuration, and while it cannot be known nothing else does."""

import json
import re

import anyio
import anyio.to_thread
import pytest

from gpu_plugin.runtime import control
from tests.node.daemon import GPU, healthy
from tests.node.forked import ran
from tests.unit.cluster.api_server import NODE, FakeApiServer

LABEL = "nvidia.com/device-plugin.config"
SHARED = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"


@pytest.fixture
def configs(directory):
    made = directory / "configs"
    made.mkdir()
    (made / "default").write_text("version: v1\n")
    (made / "shared").write_text(SHARED)
    return made


@pytest.fixture
async def api():
    async with FakeApiServer() as running:
        yield running


@pytest.fixture
def flags(configs, directory, api):
    return (f"--config-file-srcdir={configs}", f"--node-name={NODE}", f"--kubeconfig={api.kubeconfig(directory)}")


async def status(daemon):
    return await anyio.to_thread.run_sync(control.request, daemon.state, "status")


async def test_gpus_stay_shared_over_a_restart_while_the_api_is_away(kubelet, daemon, api, flags):
    api.labels = {LABEL: "shared"}
    daemon.start(*flags)
    await kubelet.wait_for(healthy(kubelet, 32))
    daemon.kill()
    await api.stop()
    daemon.start(*flags)
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 32))
    told = (await status(daemon))["configuration"]
    assert told["file"].endswith("/shared")
    assert told["refused"].endswith("; config shared stays in force")
    assert "the Kubernetes API cannot be reached" in told["refused"]
    await api.start()
    api.label(None)
    await kubelet.wait_for(healthy(kubelet, 8))
    told = (await status(daemon))["configuration"]
    assert (told["file"].rpartition("/")[2], told["wanted"], told["refused"], told["unheard"]) == (
        "default",
        "",
        "",
        "",
    )


@pytest.mark.parametrize("refused", [403, None])
async def test_a_node_that_never_had_a_configuration_offers_nothing_by_another(kubelet, daemon, api, flags, refused):
    # 403: the API forbids the question; None: the label names no file.
    if refused:
        api.refusals = [("get", refused)] * 1000
    else:
        api.labels = {LABEL: "b200"}
    daemon.start(*flags, "--default-config=default", "--fallback-strategies=named,empty")
    await daemon.said("nothing is served until there is a valid configuration")
    with pytest.raises(control.ControlError, match=r"^nothing is served yet.*(403|specified config b200)"):
        await anyio.to_thread.run_sync(lambda: control.request(daemon.state, "cordon", gpu=0))
    for form in ([], ["-o", "json"], ["--metrics"]):
        done = await ran("status", "--state-dir", daemon.state, *form)
        assert (done.returncode, done.stderr) == (1, "")
        if "json" in form:
            told = json.loads(done.stdout)
            assert told["waiting"].startswith("nothing is served yet, since there is no configuration")
            assert re.search("403|specified config b200", " ".join(each["cause"] for each in told["problems"]))
            assert told["daemon"]["pid"] == daemon.process.pid
        elif form:
            assert "gpu_plugin_config_reloads_total" in done.stdout
        else:
            assert "Nothing is served yet" in done.stdout
    assert not kubelet.resources
    api.refusals = []
    api.label("shared")
    await kubelet.wait_for(healthy(kubelet, 32))
    api.label("b200")
    await daemon.said("config shared stays in force")
    told = (await status(daemon))["configuration"]
    assert told["file"].endswith("/shared")
    assert told["wanted"].endswith("/b200")
    assert kubelet.resources[GPU].allocatable == 32
