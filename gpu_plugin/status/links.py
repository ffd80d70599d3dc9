"""The links between a node's GPUs in the status, and their picture. Pure."""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256

from gpu_plugin.devices.device import GPU
from gpu_plugin.devices.node import Node
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views import matrix
from gpu_plugin.placement.views.groups import LinkGroups
from gpu_plugin.placement.views.picture import dark_style, picture
from gpu_plugin.placement.views.report import OfferedResource, held_back
from gpu_plugin.status.model import Links

# The hash of the picture's own style, for a Content-Security-Policy.
STYLE_HASH = f"sha256-{b64encode(sha256(dark_style().encode()).digest()).decode()}"


def links(node: Node, resources: Sequence[OfferedResource], name: str) -> tuple[Links | None, str]:
    """Return the links and their picture as SVG; None and an empty text with fewer than two GPUs or without a known link.

    `name` is the node's name. GPUs that pods do not get now are struck through in the picture.
    """
    if len(node.gpus) < 2 or not node.links:
        return None, ""
    groups = LinkGroups.of(node)
    struck = {each.visible_id: each.reason for each in held_back(node, resources) if each.kind == GPU}
    drawn = picture(groups, Topology.of(node), name, struck)
    every = range(len(groups.gpus))
    found = Links(
        gpus=tuple(gpu.index for gpu in groups.gpus),
        rows=tuple(tuple(matrix.SELF if a == b else matrix.word(groups.links[a][b]) for b in every) for a in every),
        words=tuple(matrix.words(groups)),
        legend=dict(matrix.meanings(groups)),
        version=sha256(drawn.encode()).hexdigest()[:16],
    )
    return found, drawn
