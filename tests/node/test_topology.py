"""What operators see of the topology of a running node."""

import json

from tests.node.daemon import GPU, healthy
from tests.node.forked import ran


async def asked(daemon, *arguments: str) -> str:
    """What a command prints of the daemon's node."""
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
    daemon.fault(3, **{"nvlink-down": 3})  # one of the two to GPU 2
    await daemon.said("NVLink 3 went down")  # after two looks: with the first one the links were read
    await daemon.said("links between GPUs have changed: 2-3 NV2, now NV1")
    told = json.loads(await asked(daemon, "topology", "--json"))
    assert [link["nvlinks"] for link in told["links"] if (link["a"], link["b"]) == (2, 3)] == [1]
    best = json.loads(await asked(daemon, "simulate-allocation", "--available", "0-3", "--size", "2", "--json"))
    assert best["choice"]["gpus"] == [0, 3]


async def test_pods_of_a_node_with_one_pcie_relation_stay_on_one_socket(kubelet, directory, daemon):
    """In a virtual machine all GPUs may be behind one host bridge, on whichever socket they are."""
    node = directory / "node.yaml"
    sockets = "".join(f"  - {{numa_node: {gpu // 4}}}\n" for gpu in range(8))
    bridge = "pcie: {host_bridge: [[0, 1, 2, 3, 4, 5, 6, 7]]}"
    node.write_text(f"count: 8\ngpu: {{name: Own, architecture: 7}}\ngpus:\n{sockets}{bridge}\n")
    daemon.profile = str(node)
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    told = []
    for pod, size in enumerate((1, 1, 4)):
        admitted = await kubelet.admit(f"pod-{pod}", {GPU: size})
        told.append(sorted(kubelet.resources[GPU].numa[device] for device in admitted.ids))
    assert told == [[(0,)], [(0,)], [(1,)] * 4]
