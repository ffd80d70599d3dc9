"""Plugins by resource: the connections, the table for each stream, and the effects of the end of a stream.

Sources: pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go (connectClient, runClient, disconnectClient) and
devicemanager/manager.go (PluginConnected, PluginDisconnected), of 1.36.3 and 1.37.2.

Up to 1.36 the kubelet finds clients by resource name, so the end of an old stream disconnects the newer client. From 1.37 on it
finds them by resource name and socket path, and each resource has all of its connected endpoints: when an endpoint ends,
requests go to another endpoint, and the device list stays as it was. Go picks a random endpoint; the stand-in picks the oldest,
so that the requests move even from an endpoint that continues.
"""

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from demo.stand_in_kubelet.client import AlreadyConnectedError, CallError, DropKind, PluginClient
from demo.stand_in_kubelet.device_table import ListedDevice, ResourceState, list_breaches, parse
from demo.stand_in_kubelet.journal import EventKind, Journal
from gpu_plugin.kubelet import messages, wire

Generation = Literal["1.36", "1.37"]

DIAL_SECONDS = 10.0
DIAL_BACKOFF_SECONDS = 1.0


class Endpoint(msgspec.Struct, frozen=True):
    """The client for requests for a resource, and the plugin's options from its registration."""

    client: PluginClient
    pre_start_required: bool
    preferred_available: bool


class PluginRegistry:
    """All plugins of one kubelet, which `restart` removes, like the end of a kubelet's process.

    Attributes:
        tables: the state of each resource, by resource name.
        endpoints: the endpoint of each resource. It stays after the plugin disconnects; then its table is marked as stopped.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        generation: Generation,
        clock: Callable[[], float],
        rng: random.Random,
        dial_timeout: float,
        list_received: Callable[[str, set[str]], None],
        list_again: Callable[[], bool],
    ) -> None:
        self._journal = journal
        self._generation = generation
        self._clock = clock
        self._rng = rng
        self._dial_timeout = dial_timeout
        self._list_received = list_received
        self._list_again = list_again
        self.restart()

    def restart(self) -> None:
        """Begin without plugins and resources. The connections must have been dropped."""
        self.tables: dict[str, ResourceState] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self._clients: dict[tuple[str, str], PluginClient] = {}
        self._connected: dict[str, dict[str, Endpoint]] = {}  # from 1.37 on: by resource name and socket path
        self._every_client: set[PluginClient] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def add_stopped(self, resource: str) -> None:
        """Add a resource from the checkpoint: known, stopped, without devices."""
        self.tables[resource] = ResourceState(resource, stopped_at=self._clock())

    async def connect(self, resource: str, path: Path) -> None:
        """Connect to a plugin that registers, read its options and start its ListAndWatch.

        Raises client.DialError, client.CallError if the options cannot be read, or AlreadyConnectedError. Then the kubelet has
        no client of that name (from 1.37 on, at that path) any more, not even a client from before.
        """
        client = PluginClient(resource, str(path))
        key = self._key(client)
        if self._generation == "1.36":
            self._clients[key] = client
        else:
            self._clients.setdefault(key, client)  # a list in Go, whose first entry for a path counts
        self._every_client.add(client)
        try:
            await client.dial(self._dial_timeout, DIAL_BACKOFF_SECONDS, self._rng)
            options = messages.decode(messages.DevicePluginOptions, await client.call(wire.OPTIONS, wire.EMPTY))
            self._refuse_connected(client)
        except BaseException as error:
            self._clients.pop(key, None)
            # The kubelet leaves the connection open if the plugin answered but was refused.
            if not isinstance(error, (CallError, AlreadyConnectedError)):
                client.close()
                self._every_client.discard(client)
            raise
        required, available = options.pre_start_required, options.get_preferred_allocation_available
        self.endpoints[resource] = Endpoint(client, required, available)
        if self._generation != "1.36":
            self._connected.setdefault(resource, {})[client.path] = self.endpoints[resource]
        if resource in self.tables:  # a new resource appears with its first list
            self._serve_from(self.endpoints[resource])
        self._spawn(client)

    def drop_stream(self, resource: str, how: DropKind) -> None:
        """End all ListAndWatch streams of a resource from this side. Raises KeyError if there is no stream."""
        clients = self._watching(resource)
        if not clients:
            raise KeyError(f"no ListAndWatch stream of {resource} is open")
        for client in clients:
            client.drop_stream(how)

    def remove_expired(self) -> bool:
        """Remove resources without a plugin for over five minutes, as a node status update does. Return whether any was."""
        now = self._clock()
        expired = [name for name, state in self.tables.items() if state.grace_over(now)]
        for resource in expired:
            del self.tables[resource]
            self.endpoints.pop(resource, None)
            self._journal.note(EventKind.REMOVED, resource, text="no plugin for over five minutes: capacity 0")
        return bool(expired)

    def drop(self, *, orderly: bool) -> None:
        """Close all connections to plugins now, with GOAWAY if `orderly`."""
        self._stopping = True
        for client in self._every_client:
            client.close(goaway=orderly)

    async def wait_dropped(self) -> None:
        """Wait until the tasks of the closed connections have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _key(self, client: PluginClient) -> tuple[str, str]:
        return client.resource, "" if self._generation == "1.36" else client.path

    def _refuse_connected(self, client: PluginClient) -> None:
        """From 1.37 on, refuse a connected path.

        The caller then removes every client of the path, so that the end of the connected endpoint's stream goes unnoticed:
        it stays connected, and the path is refused, until the kubelet restarts.
        """
        if client.path in self._connected.get(client.resource, {}):
            raise AlreadyConnectedError(f"device plugin already connected: {client.path}")

    def _watching(self, resource: str) -> list[PluginClient]:
        return [client for client in self._every_client if client.resource == resource and client.watching]

    def _spawn(self, client: PluginClient) -> None:
        task = asyncio.create_task(self._run(client), name=f"ListAndWatch of {client.resource} at {client.path}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._journal.breach("", f"the stand-in kubelet itself failed: {error!r}")

    async def _run(self, client: PluginClient) -> None:
        resource = client.resource
        process = _process(client)
        twins = [other for other in self._watching(resource) if _process(other) == process]
        if twins:
            self._journal.breach(
                resource,
                f"process {client.pid} has {len(twins) + 1} live ListAndWatch streams, at "
                f"{' and '.join(sorted({other.path for other in twins} | {client.path}))}: "
                "close the old transports before registering again",
            )
        self._journal.note(EventKind.STREAM_OPENED, resource, endpoint=client.path, pid=client.pid)
        client.watching = True
        self._count_streams(resource)
        before: list[ListedDevice] | None = None

        def receive(data: bytes, arrived: float) -> None:
            nonlocal before
            before = self._receive(client, data, arrived, before)

        try:
            end = await client.watch(receive)
        finally:
            self._count_streams(resource)
        text = end.code if end.code == "OK" else f"{end.code}: {end.description}"
        self._journal.note(EventKind.STREAM_ENDED, resource, endpoint=client.path, pid=client.pid, text=text)
        if end.code == "ResourceExhausted":
            self._journal.breach(resource, f"list over {wire.MAX_MESSAGE_BYTES} bytes: {end.description}")
        if not self._stopping:
            self._disconnect(client)

    def _disconnect(self, ended: PluginClient) -> None:
        """Remove the client with the ended client's key and stop its resource. Without such a client nothing happens."""
        client = self._clients.pop(self._key(ended), None)
        if client is None:
            return
        if not client.lingering and client.connected:
            client.close()
            self._every_client.discard(client)
        connected = self._connected.get(client.resource, {})
        connected.pop(client.path, None)
        if connected:  # only from 1.37 on
            self.endpoints[client.resource] = next(iter(connected.values()))
            if client.resource in self.tables:
                self._serve_from(self.endpoints[client.resource])
        elif client.resource in self.endpoints:
            self._table(client.resource).mark_unhealthy(self._clock())
        self._journal.wake()

    def _receive(
        self, client: PluginClient, data: bytes, arrived: float, before: list[ListedDevice] | None
    ) -> list[ListedDevice]:
        resource = client.resource
        try:
            devices = parse(data)
        except ValueError as error:
            self._journal.breach(resource, f"a list that cannot be read: {error}")
            return []
        state = self._table(resource)
        # There is a reason to send the same list again if a request had a device that is not healthy in the newest list, and if
        # the newest list replaced the list of another plugin, which may send another list before it ends.
        table = {} if len(set(state.listed_by)) > 1 or state.requested - state.healthy else state.devices
        state.requested, state.listed_by = set(), (*state.listed_by[-1:], client.path)
        for breach in list_breaches(devices, before, table, self._list_again):
            self._journal.breach(resource, breach)
        had = state.devices
        changed = state.replace(devices)
        text = f"{state.allocatable} healthy of {state.capacity}"
        self._journal.note(
            EventKind.LIST, resource, endpoint=client.path, pid=client.pid, text=text, changed=changed, at=arrived
        )
        gone = had.keys() - state.devices.keys()
        if before is not None:  # a plugin refuses devices that only another plugin has listed, so these may disappear
            gone &= {device.id for device in before}
        self._list_received(resource, gone)
        return devices

    def _table(self, resource: str) -> ResourceState:
        if resource not in self.tables:
            self.tables[resource] = ResourceState(resource, streams=len(self._watching(resource)))
            if resource in self.endpoints:
                self._serve_from(self.endpoints[resource])
        return self.tables[resource]

    def _serve_from(self, endpoint: Endpoint) -> None:
        state = self.tables[endpoint.client.resource]
        state.endpoint, state.stopped_at = endpoint.client.path, None

    def _count_streams(self, resource: str) -> None:
        if resource in self.tables:
            self.tables[resource].streams = len(self._watching(resource))


def _process(client: PluginClient) -> int | str:
    """Identify the process of a client. Endpoints of this process itself count as separate processes."""
    return client.path if client.pid in (0, os.getpid()) else client.pid
