"""A change of MIG mode that waits for a reset, and a vGPU without a license: an operator sees both, with what to do."""

import json

import anyio
import pytest

from tests.node.forked import ran

PROFILE = """
gpu: {name: NVIDIA A100-SXM4-40GB, memory_bytes: 42949672960, mig_profiles: a100-40gb, fields: {83: 0}}
gpus: [{mig_mode: [0, 1]}, {mig_mode: [1, 0]}, {vgpu_licensed: false}, {vgpu_licensed: true, mig_mode: [1, 1]}]
"""


@pytest.fixture
def node(daemon, directory):
    """A daemon that runs, on a node of which no GPU is at fault."""
    file = directory.parent / "node.yaml"
    file.write_text(PROFILE)
    daemon.profile = str(file)
    daemon.start("--mig-strategy", "mixed")
    return daemon


async def text(node, verb):
    return (await ran(verb, "--state-dir", node.state)).stdout


def check(said):
    """Check the notices: two for a MIG mode, one for a license, and nothing else."""
    assert said.count("MIG mode is off, and will be on after a reset") == 1
    assert said.count("MIG mode is on, and will be off after a reset") == 1
    assert "has no license" in said


async def test_both_are_in_status_and_explain(node):
    with anyio.fail_after(20):
        while "no license" not in await text(node, "status"):
            await anyio.sleep(0.05)
    said = " ".join((await text(node, "explain")).split())
    check(said)
    for command in ("gpu-plugin release", "nvidia-smi --gpu-reset", "gpu-plugin resume", "-mig 0", "-mig 1"):
        assert command in said
    assert "nvidia-gridd" in said
    told = json.loads((await ran("status", "--state-dir", node.state, "-o", "json")).stdout)
    noted = [len(gpu["notices"]) for gpu in told["gpus"]]
    assert noted == [1, 1, 1, 0]
    assert [gpu["readings"]["vgpu_licensed"] for gpu in told["gpus"]] == [None, None, False, True]
    assert all(gpu["healthy"] for gpu in told["gpus"])
    assert [each["severity"] for each in told["problems"] if each["kind"] == "notice"] == ["note"] * 3


async def test_both_are_in_doctor(node):
    done = await ran("doctor", "-o", "json", "--simulate", node.profile, "--state-dir", node.state)
    found = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "gpus"]
    assert [each["status"] for each in found] == ["warning"] * 3
    check(" ".join(each["found"] for each in found))
    assert all(each["remedy"] for each in found)
