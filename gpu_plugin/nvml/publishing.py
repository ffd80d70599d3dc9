"""The node as it is known: its GPUs with the links between them and their device nodes, passed on where any of it changed."""

from collections.abc import Callable, Sequence

from gpu_plugin.devices.node import Node
from gpu_plugin.nvml.links import Links
from gpu_plugin.nvml.session import Opened
from gpu_plugin.nvml.watched import Watched

AS_BEFORE = Opened()
"""The driver that was opened before still, or one that nobody has asked yet."""


class Publisher:
    """Makes the node of its parts. `device_nodes` are paths under /dev, as the host told them last."""

    def __init__(self, links: Links, found: Callable[[Node], None], node: Node) -> None:
        """`found` is told of each node that is not the one before; the first one before is `node`."""
        self._links = links
        self._found = found
        self.node = node
        self.device_nodes: frozenset[str] = frozenset()

    def publish(self, gpus: Sequence[Watched], opened: Opened = AS_BEFORE) -> None:
        """Passes on the node with these GPUs, under the driver as it was `opened`."""
        self._links.came()
        found = tuple(watched.gpu for watched in gpus)
        uuids = [gpu.uuid for gpu in found]
        links, cliques = self._links.between(uuids), self._links.cliques(uuids)
        version = opened.version or self.node.driver_version
        cuda = opened.cuda or self.node.cuda_version
        node = Node(found, links, version, self.device_nodes, cliques, cuda)
        if node != self.node:
            self.node = node
            self._found(node)
