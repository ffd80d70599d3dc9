"""Changes while the daemon runs: the configuration, and the MIG partitions of its GPUs."""

import json
import re
import shutil
import time

import anyio
import pytest

from demo.stand_in_kubelet import Container
from gpu_plugin.cli import main
from tests.node.daemon import GPU, healthy

SMALL, HALF = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"


def sharing(replicas):
    return f"version: v1\nsharing: {{timeSlicing: {{resources: [{{name: nvidia.com/gpu, replicas: {replicas}}}]}}}}\n"


def served(kubelet, **counts):
    return lambda: all(
        healthy(kubelet, count, name.replace("gpu", "nvidia.com/gpu"))() for name, count in counts.items()
    )


@pytest.fixture
def config(directory):
    """A config file in a mounted ConfigMap: a link to a link that is replaced on each change."""
    volume = directory / "config"
    (volume / "..1").mkdir(parents=True)
    (volume / "..1" / "config.yaml").write_text("version: v1\n")
    (volume / "..data").symlink_to("..1")
    (volume / "config.yaml").symlink_to("..data/config.yaml")

    def swap(text):
        new = volume / f"..{time.monotonic_ns()}"
        new.mkdir()
        (new / "config.yaml").write_text(text)
        (volume / "..new").symlink_to(new.name)
        (volume / "..new").replace(volume / "..data")

    swap.file = volume / "config.yaml"  # type: ignore[attr-defined]
    return swap


async def test_a_config_map_is_applied_within_two_seconds_without_a_new_registration(kubelet, daemon, config):
    daemon.start("--config-file", str(config.file))
    await kubelet.wait_for(healthy(kubelet, 8))
    with anyio.fail_after(10):
        began = time.monotonic()
        config(sharing(4))
        await kubelet.wait_for(healthy(kubelet, 32))
        took = time.monotonic() - began
    assert took < 5  # two seconds on a machine with nothing else to do
    assert kubelet.registrations[GPU].total == 1


async def test_a_bad_configuration_keeps_the_last_good_one_and_says_so(kubelet, daemon, config, capsys):
    config(sharing(2))
    daemon.start("--config-file", str(config.file))
    await kubelet.wait_for(healthy(kubelet, 16))
    config("version: v1\nsharing: {timeSlicing: {resource: []}}\n")
    await daemon.said("did you mean")
    assert healthy(kubelet, 16)()
    assert main(["status", "--state-dir", str(daemon.state), "-o", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert "did you mean" in told["configuration"]["refused"]
    assert [(each["kind"], each["severity"]) for each in told["problems"]] == [("configuration", "warning")]
    assert main(["status", "--metrics", "--state-dir", str(daemon.state)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "gpu_plugin_config_refused 1" in told
    [refused] = [line for line in told if line.startswith('gpu_plugin_config_reloads_total{result="refused"} ')]
    assert int(refused.split()[-1]) >= 1
    assert f'gpu_plugin_devices{{resource="{GPU}",state="healthy"}} 16' in told
    config(sharing(3))
    await kubelet.wait_for(healthy(kubelet, 24))
    assert main(["status", "--state-dir", str(daemon.state)]) == 0


async def test_hardware_that_a_pod_holds_is_not_given_away_without_pod_resources_and_without_memory(
    kubelet, directory, daemon
):
    file = directory / "config.yaml"
    file.write_text("version: v1\n")
    start = ("--config-file", str(file), "--pod-resources-socket", str(directory / "none"))
    daemon.start(*start)
    await kubelet.wait_for(healthy(kubelet, 8))
    await kubelet.admit("old", containers=[Container("init", {GPU: 1}, "init"), Container("app", {GPU: 2})])
    file.write_text("version: v1\nresources: {gpus: [{pattern: '*', name: example.com/h100}]}\n")
    await kubelet.wait_for(healthy(kubelet, 6, "example.com/h100"))
    daemon.kill()
    shutil.rmtree(daemon.state)
    daemon.start(*start)
    await kubelet.wait_for(lambda: kubelet.registrations["example.com/h100"].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 6, "example.com/h100"))
    assert kubelet.registrations[GPU].accepted == 1, "it may be another plugin's name by now"
    kubelet.release("old")
    await kubelet.admit("new", {"example.com/h100": 1})  # the kubelet drops ended pods and writes its checkpoint
    await kubelet.wait_for(healthy(kubelet, 8, "example.com/h100"))


async def test_what_is_gone_is_unhealthy_even_if_the_new_partition_cannot_be_served(kubelet, directory, daemon):
    file = directory / "config.yaml"
    listed = "sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-3g.40gb, replicas: 40000}]}}"
    file.write_text(f"version: v1\n{listed}\n")
    daemon.profile = "h100-mig-single"
    daemon.start("--mig-strategy", "mixed", "--config-file", str(file))
    await kubelet.wait_for(healthy(kubelet, 56, SMALL))
    daemon.fault(0, mig="3g.40gb,3g.40gb")
    await daemon.said("ask for fewer replicas; the former devices are still served, except devices that are gone")
    await kubelet.wait_for(healthy(kubelet, 49, SMALL))


# MIG


async def test_a_gpu_in_mig_mode_is_withheld_without_a_mig_strategy_until_the_mode_is_off_or_the_strategy_fits(
    kubelet, daemon, config, capsys
):
    daemon.start("--config-file", str(config.file))
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(2, mig="3g.40gb")
    await kubelet.wait_for(healthy(kubelet, 7))
    assert main(["status", "--state-dir", str(daemon.state)]) == 1
    shown = capsys.readouterr().out
    assert "nvidia-smi -i 2 -mig 0" in shown
    assert re.search(r"^2 +withheld ", shown, re.MULTILINE)
    assert sum("nvidia-smi -i 2 -mig 0" in line for line in daemon.log.read_text().splitlines()) == 1
    config("version: v1\nflags: {migStrategy: mixed}\n")
    await kubelet.wait_for(healthy(kubelet, 1, HALF))
    config("version: v1\n")
    await kubelet.wait_for(healthy(kubelet, 7))
    daemon.fault(2, mig="none")
    await kubelet.wait_for(healthy(kubelet, 8))
