"""The content that the HTTP listener serves: facts for probes, the status for scrapes, and the status page."""

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.daemon.node_view import NodeView
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.pod_listing import HoldersByDevice
from gpu_plugin.state.event_store import EventStore

if TYPE_CHECKING:
    from gpu_plugin.telemetry.listener.checks import Facts
    from gpu_plugin.telemetry.listener.status_page import Source


class ListenerContent:
    """The daemon, as the listener asks it. Everything runs on the event loop."""

    def __init__(
        self, settings: SettingsStore, view: NodeView, attribution: PodAttribution, events: EventStore
    ) -> None:
        self._settings = settings
        self._view = view
        self._attribution = attribution
        self._events = events

    def facts(self) -> "Facts":
        """The facts for probes."""
        return self._view.facts()

    async def scraped(self) -> Mapping[str, object]:
        """The status for a scrape."""
        return await self._view.scraped()

    def page(self) -> "Source":
        """The source of the status page."""
        from gpu_plugin.telemetry.listener.status_page import Source  # noqa: PLC0415 - only needed with a listener

        return Source(
            on=self._page_is_on,
            names=self._names,
            held=self._held_by_containers,
            material=self._view.material,
            news=self._events.news,
        )

    def _page_is_on(self) -> bool:
        return self._settings.current.status_page

    def _names(self) -> tuple[str, ...]:
        settings = self._settings.current
        return (*settings.status_page_hosts, (settings.node_name or socket.gethostname()).lower())

    async def _held_by_containers(self) -> tuple[HoldersByDevice | None, str]:
        if not self._settings.current.pod_metrics:
            return None, "naming pods is switched off (--pod-metrics=false)"
        held = await self._attribution.current()
        return held, "" if held is not None else self._attribution.trouble
