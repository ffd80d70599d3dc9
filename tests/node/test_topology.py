"""The commands that show the topology of a running node."""

import json

from tests.node.daemon import healthy
from tests.node.forked import ran


async def asked(daemon, *arguments: str) -> str:
    """Return the output of a command about the daemon's node."""
    done = await ran(*arguments, "--state-dir", daemon.state)
    done.check_returncode()
    return done.stdout


async def test_the_running_daemons_topology_follows_its_links(kubelet, daemon):
    daemon.profile = "dgx1-v100"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    assert "NVLink: GPUs 0-7: NV1 to NV2, 16 of 28 pairs" in await asked(daemon, "topology")
    best = json.loads(await asked(daemon, "simulate-allocation", "--available", "0-3", "--size", "2", "--json"))
    assert best["choice"]["gpus"] == [2, 3]
    daemon.fault(3, **{"nvlink-down": 3})  # one of two links to GPU 2
    await daemon.said("NVLink 3 went down")  # after two looks: with the first one the links were read
    await daemon.said("links between GPUs have changed: 2-3 NV2, now NV1")
    told = json.loads(await asked(daemon, "topology", "--json"))
    assert [link["nvlinks"] for link in told["links"] if (link["a"], link["b"]) == (2, 3)] == [1]
    best = json.loads(await asked(daemon, "simulate-allocation", "--available", "0-3", "--size", "2", "--json"))
    assert best["choice"]["gpus"] == [0, 3]
