"""The content that the HTTP listener serves: facts for probes, the status for scrapes, and the status page."""

import socket
from typing import TYPE_CHECKING

from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.daemon.node_view import AllocatedDevices, NodeView
from gpu_plugin.daemon.status_answers import StatusAnswers

if TYPE_CHECKING:
    from gpu_plugin.status.model import Status
    from gpu_plugin.telemetry.listener.checks import Facts


class ListenerContent:
    """The daemon, as the listener reads it. Everything runs on the event loop."""

    def __init__(self, settings: SettingsStore, view: NodeView, answers: StatusAnswers) -> None:
        self._settings = settings
        self._view = view
        self._answers = answers

    def facts(self) -> "Facts":
        """The facts for probes."""
        return self._view.facts()

    async def scraped(self) -> "tuple[Status, AllocatedDevices]":
        """The status for a scrape, and the devices that containers hold."""
        return await self._answers.scraped()

    def page_is_on(self) -> bool:
        """Whether the settings enable the status page."""
        return self._settings.current.status_page

    def page_names(self) -> tuple[str, ...]:
        """The names under which the page may be shown, in lower case."""
        settings = self._settings.current
        return (*settings.status_page_hosts, (settings.node_name or socket.gethostname()).lower())

    async def page_status(self) -> "Status":
        """The status for the page."""
        return await self._answers.page()

    def links_picture(self) -> str:
        """The picture of the links as SVG; empty without links."""
        return self._view.picture()
