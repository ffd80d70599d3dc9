"""Answer with the status: on the control socket, to scrapes, and to the status page.

The modules that build the status are imported at the first request, since pods wait for the daemon's start.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from anyio.lowlevel import checkpoint

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.daemon.node_view import AllocatedDevices, NodeView

if TYPE_CHECKING:
    from gpu_plugin.status.model import Status

DEVICES_PER_PIECE = 500  # Devices that are converted before other tasks run: 1 ms


class StatusAnswers:
    """Answers with the daemon's status. Everything runs on the event loop."""

    def __init__(self, view: NodeView) -> None:
        self._view = view

    async def status(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Return the status with the devices that pods hold, the counters and the settings, for the control socket.

        The health that it reports is written before the reply, so that it outlives a kill of this process.
        """
        from gpu_plugin.daemon.node_status import as_reply, built, counters, pods  # noqa: PLC0415

        if request:
            raise ConfigError(f"{', '.join(sorted(request))}: not a field of this verb")
        await self._view.recorder.written()
        held = await self._view.attribution.newest()
        # With tens of thousands of held devices, the steps before and after this line take tens of milliseconds each.
        await checkpoint()
        status, settings = built(self._view, held), self._view.configuration.in_full()
        if not self._view.configuration.settings.pod_metrics:
            return as_reply(status, counters=counters(self._view), settings=settings)
        devices = []
        for each in self._view.allocated(held):
            devices.append(each)
            if not len(devices) % DEVICES_PER_PIECE:
                await checkpoint()
        return as_reply(
            status, counters=counters(self._view), settings=settings, pods=pods(self._view, held, tuple(devices))
        )

    async def waiting(self, request: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG002
        """Return the status while another daemon has the node. Do not query the kubelet."""
        from gpu_plugin.daemon.node_status import as_reply, built, counters  # noqa: PLC0415

        return as_reply(built(self._view), counters=counters(self._view), settings=self._view.configuration.in_full())

    async def scraped(self) -> "tuple[Status, AllocatedDevices]":
        """Return the status for a scrape of the metrics, and the devices that containers held some seconds ago.

        Do not wait for a slow kubelet. Each device is made when the caller iterates to it.
        """
        from gpu_plugin.daemon.node_status import scraped  # noqa: PLC0415

        if not self._view.configuration.settings.pod_metrics:
            return scraped(self._view), iter(())
        held = await self._view.attribution.shortly()
        return scraped(self._view, held), self._view.allocated(held)

    async def page(self) -> "Status":
        """Return the status for the status page: with pods, links and the newest events."""
        from gpu_plugin.daemon.node_status import on_page  # noqa: PLC0415

        is_on = self._view.configuration.settings.pod_metrics
        return on_page(self._view, await self._view.attribution.current() if is_on else None)
