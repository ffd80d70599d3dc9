"""What the daemon tells of its node's topology, and how a command reads it: plain objects that JSON can carry."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gpu_plugin.devices.node import Gpu, Link, Node

_GPU = ("index", "uuid", "model", "architecture", "pci_bus_id", "numa_node", "unreadable")

_LINK = tuple(field.name for field in fields(Link))


def report(node: Node) -> Mapping[str, object]:
    """The GPUs of a node by index and every pair of them once: `a` and `b` are places in the list `gpus`.

    `clique` is the NVSwitch mesh that a GPU is part of, None where it is in none; all else is as `Gpu` and `Link` have it.
    """
    gpus = sorted(node.gpus, key=lambda gpu: gpu.index)
    return {
        "gpus": [{name: getattr(gpu, name) for name in _GPU} | {"clique": node.cliques.get(gpu.uuid)} for gpu in gpus],
        "links": [
            {"a": a, "b": b} | {name: getattr(link, name) for name in _LINK}
            for b, other in enumerate(gpus)
            for a, one in enumerate(gpus[:b])
            if (link := node.link(one.uuid, other.uuid))
        ],
    }


def reported(reply: Mapping[str, Any]) -> Node:
    """The node that a report is of, as far as placement looks at it.

    Raises:
        ValueError: it is no such report; one of a later version may say more than this one reads.
    """
    try:
        gpus = [Gpu(**{name: gpu[name] for name in _GPU}) for gpu in reply["gpus"]]
        links = {}
        for each in reply["links"]:
            one, other = sorted((gpus[each["a"]].uuid, gpus[each["b"]].uuid))
            links[one, other] = Link(**{name: each[name] for name in _LINK})
        cliques = {gpu["uuid"]: gpu["clique"] for gpu in reply["gpus"] if gpu["clique"] is not None}
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"this is no report of a topology: {error!r}") from None
    return Node(tuple(gpus), links, cliques=cliques)
