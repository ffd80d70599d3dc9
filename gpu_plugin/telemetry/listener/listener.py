"""Starts the HTTP listener of the daemon as soon as its address is known, even before there is anything to serve."""

import resource
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc

from gpu_plugin.config.values import host_and_port
from gpu_plugin.runtime.supervision import forever

if TYPE_CHECKING:
    from gpu_plugin.status.model import Status
    from gpu_plugin.telemetry.listener.checks import Facts
    from gpu_plugin.telemetry.listener.probes import Probes
    from gpu_plugin.telemetry.listener.status_page import StatusPage
    from gpu_plugin.telemetry.metrics.families import Held


# Limit of descriptors to set. A higher limit has no use, and slows programs that close every possible descriptor.
WANTED_DESCRIPTORS = 4096


class ServedDaemon(Protocol):
    """The daemon, as the listener asks it."""

    def facts(self) -> "Facts":
        """The facts for probes."""

    async def scraped(self) -> "tuple[Status, Iterable[Held]]":
        """The status for a scrape, and the devices that containers hold."""

    def page_is_on(self) -> bool:
        """Whether the status page is enabled now."""

    def page_names(self) -> Collection[str]:
        """The names, in lower case, under which the status page may be shown in addition to localhost and addresses."""

    async def page_status(self) -> "Status":
        """The status for the status page, with pods, links and the newest events."""

    def links_picture(self) -> str:
        """The picture of the links as SVG; empty if no links are known."""


class Listener:
    """Answers probes and scrapes in the caller's task group. Imports its modules only if there is an address."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._scope = anyio.CancelScope()
        self._probes: Probes | None = None
        self._page: StatusPage | None = None

    def begin(self, address: str, facts: "Callable[[], Facts]") -> None:
        """Listen on HOST:PORT, unless it listens already or `address` is empty. Use these facts for probes."""
        if self._probes is not None:
            self._probes.facts = facts
        if not address or self._probes is not None:
            return
        from gpu_plugin.telemetry.listener.probes import Probes  # noqa: PLC0415 - imported only if used
        from gpu_plugin.telemetry.listener.server import Limits, Server  # noqa: PLC0415
        from gpu_plugin.telemetry.listener.status_page import StatusPage  # noqa: PLC0415

        probes = self._probes = Probes(facts)
        page = self._page = StatusPage(lambda: probes.facts().awaited or "the daemon is starting")
        limits = Limits(connections=connections())
        server = Server(*host_and_port(address), {**probes.pages, **page.pages}, limits)
        self._tasks.start_soon(self._run, probes, server.run)

    async def _run(self, probes: "Probes", serve: Callable[[], Any]) -> None:
        with self._scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(probes.beat)
                tasks.start_soon(forever, "the listener for probes and metrics", serve)

    def ask(self, daemon: ServedDaemon) -> None:
        """Use the daemon's facts for probes, its status for scrapes, and its content for the status page."""
        if self._probes is not None and self._page is not None:
            self._probes.facts, self._probes.status = daemon.facts, daemon.scraped
            self._page.source = daemon

    def stop(self) -> None:
        """Close the listening sockets and all connections."""
        self._scope.cancel()


def connections() -> int:
    """Return the largest number of connections: an eighth of the descriptors, from 2 to 32.

    The kubelet's connections need descriptors too. Raises the limit of descriptors to `WANTED_DESCRIPTORS` if possible, and
    never lowers it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 32
    wanted = max(soft, WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS))
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(max(wanted // 8, 2), 32)
