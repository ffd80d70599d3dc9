"""The state that must outlive a restart of the daemon, in the form that the recorder writes."""

from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.state.recorder import Known


class NodeKnowledge:
    """The evidence against GPUs, the hardware, and the devices that the kubelet knows or that pods hold."""

    def __init__(self, health: HealthWatch, inventory: Inventory, now: Now) -> None:
        self._health = health
        self._inventory = inventory
        self._now = now

    @property
    def revision(self) -> int:
        """A number that grows with each change of evidence."""
        return self._health.ledger.revision

    def known(self) -> Known:
        """Return the present state."""
        inventory = self._inventory
        return Known(self.revision, self._health.evidence(), self._now.node, inventory.listed, inventory.foreign)
