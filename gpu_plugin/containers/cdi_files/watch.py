"""Follows the node and the settings, and keeps CDI specifications while a strategy needs them.

Imports the modules that make specifications only once a strategy names CDI devices.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.edits import Access, is_cdi
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import Node
from gpu_plugin.runtime.pulse import Pulse

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.readiness import CdiReadiness
    from gpu_plugin.containers.cdi_files.keeper import SpecKeeper
    from gpu_plugin.containers.cdi_files.source import Wanted

# The most seconds to wait for the first registration before specifications are made, which would delay it by 40 ms.
FIRST_SPECS = 0.5


class CdiWatch:
    """The CDI specifications of one node, if its settings ask for any."""

    def __init__(
        self,
        settings: Settings,
        host: HostView,
        driver_roots: Callable[[], Sequence[tuple[str, str]]],
        changed: "Callable[[CdiReadiness], None]",
    ) -> None:
        """`changed` is called with the devices that the specifications serve."""
        self.registered = anyio.Event()
        """Set this event once the kubelet has registered the first resource."""
        self._settings = settings
        self._host = host
        self._driver_roots = driver_roots
        self._changed = changed
        self._node = Node()
        self._access: Access | None = None
        self._asked = Pulse()
        self._keeper: SpecKeeper | None = None

    def follow(self, node: Node, settings: Settings, access: Access | None) -> None:
        """Make specifications for this node and these settings from now on. None keeps the access."""
        self._node, self._settings, self._access = node, settings, access or self._access
        self._asked.ring()
        if self._keeper is not None:
            self._keeper.follow(self._wanted())

    async def recall(self) -> None:
        """Use an earlier process's specifications if they are wanted and still valid. Waits for one second at most."""
        if self._by_cdi:
            await self._make_keeper().recall()

    async def run(self) -> None:
        """Wait until specifications are wanted, then keep them up to date until cancelled."""
        while not self._by_cdi or not self._node.gpus:
            await self._asked.wait()
        with anyio.move_on_after(FIRST_SPECS):
            await self.registered.wait()
        keeper = self._make_keeper()
        keeper.follow(self._wanted())
        await keeper.run()

    async def remove(self) -> None:
        """Remove the specifications at the end. Waits for a moment, cancelled or not."""
        if self._keeper is not None:
            await self._keeper.remove()

    @property
    def _by_cdi(self) -> bool:
        return any(map(is_cdi, self._settings.device_list_strategy))

    def _make_keeper(self) -> "SpecKeeper":
        if self._keeper is None:
            from gpu_plugin.containers.cdi_files.keeper import SpecKeeper  # noqa: PLC0415 - only CDI strategies need it
            from gpu_plugin.containers.cdi_files.source import SpecSource  # noqa: PLC0415

            source = SpecSource(self._host, self._driver_roots)
            self._keeper = SpecKeeper(source, Path(self._settings.cdi_dir), self._changed)
        return self._keeper

    def _wanted(self) -> "Wanted | None":
        """Return the inputs of the specifications; None if no strategy uses CDI names or no GPU is known yet."""
        from gpu_plugin.containers.cdi_files.source import Wanted  # noqa: PLC0415

        if not self._by_cdi or not self._node.gpus or self._access is None:
            return None
        return Wanted(self._node, self._settings, self._access)
