"""How the GPUs are linked, as the status page shows it: a picture, and the same as words and as a table. Pure."""

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from gpu_plugin.devices.device import GPU
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views import matrix
from gpu_plugin.placement.views.groups import LinkGroups
from gpu_plugin.placement.views.picture import dark_style, picture
from gpu_plugin.placement.views.report import held_back, reported, reported_resources

STYLE_HASH = f"sha256-{b64encode(sha256(dark_style().encode()).digest()).decode()}"
"""What a Content-Security-Policy calls the picture's own style by."""


def links(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The links in a report of `placement_views.report`; None where there are not two GPUs, or no link is known.

    `gpus` are the indices, in the order of `rows`, which say in nvidia-smi's words what lies between every two; `words` are the
    groups, a sentence each, and `legend` is what the words mean, by word.
    """
    node = reported(report)
    if len(node.gpus) < 2 or not node.links:
        return None
    groups = LinkGroups.of(node)
    every = range(len(groups.gpus))
    return {
        "gpus": [gpu.index for gpu in groups.gpus],
        "rows": [[matrix.SELF if a == b else matrix.word(groups.links[a][b]) for b in every] for a in every],
        "words": list(matrix.words(groups)),
        "legend": dict(matrix.meanings(groups)),
    }


def drawn(report: Mapping[str, Any], name: str) -> str:
    """The picture's SVG; `name` is what the node is called. GPUs that pods do not get now are struck through in it."""
    node = reported(report)
    held = held_back(node, reported_resources(report) or ())
    struck = {each.uuid: each.reason for each in held if each.kind == GPU}
    return picture(LinkGroups.of(node), Topology.of(node), name, struck)
