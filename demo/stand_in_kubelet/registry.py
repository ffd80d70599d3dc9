"""The connected plugins of each resource: their streams fill the resource's table, and a stream's end disconnects a plugin.

Sources: pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go (connectClient, runClient, disconnectClient) and
devicemanager/manager.go (PluginConnected, PluginDisconnected), of 1.36.3 and 1.37.2.

Up to 1.36 the kubelet finds clients by resource name, so the end of an old stream disconnects the newer client. From 1.37 on it
finds clients by resource name and socket path, and each resource has a list of its connected endpoints: when an endpoint ends,
requests go to another endpoint, and the device list does not change. Go uses a random endpoint of the remaining list. The
stand-in uses the oldest endpoint, even if the endpoint that served requests until then is still connected.
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
    """The client that receives the requests for a resource, and the options of its plugin, read at registration."""

    client: PluginClient
    pre_start_required: bool
    preferred_available: bool


class PluginRegistry:
    """All plugins of one running kubelet. Each start of the stand-in creates a new registry, as a new process would.

    Attributes:
        tables: the kubelet's records by resource name.
        endpoints: the endpoint of each resource. It stays after the plugin's end; the table then has the time of the end.
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
        self.tables: dict[str, ResourceState] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self._journal = journal
        self._generation = generation
        self._clock = clock
        self._rng = rng
        self._dial_timeout = dial_timeout
        self._list_received = list_received
        self._list_again = list_again
        self._clients: dict[tuple[str, str], PluginClient] = {}
        self._connected: dict[str, dict[str, Endpoint]] = {}  # from 1.37 on: by resource name and socket path
        self._every_client: set[PluginClient] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def add_stopped(self, resource: str) -> None:
        """Add a resource of the checkpoint. It is stopped and has no devices."""
        self.tables[resource] = ResourceState(resource, stopped_at=self._clock())

    async def connect(self, resource: str, path: Path) -> None:
        """Connect to a plugin that registers, read its options and start its ListAndWatch.

        Raises client.DialError, client.CallError if the options cannot be read, or AlreadyConnectedError. After an error the
        kubelet has no client for that name (from 1.37 on, for that path), even if it had a client before.
        """
        client = PluginClient(resource, str(path))
        key = self._key(client)
        if self._generation == "1.36":
            self._clients[key] = client
        else:
            self._clients.setdefault(key, client)  # Go has a list here and uses the first entry for a path
        self._every_client.add(client)
        try:
            await client.dial(self._dial_timeout, DIAL_BACKOFF_SECONDS, self._rng)
            options = messages.decode(messages.DevicePluginOptions, await client.call(wire.OPTIONS, wire.EMPTY))
            self._check_not_connected(client)
        except BaseException as error:
            self._clients.pop(key, None)
            # The kubelet leaves the connection open if the plugin answered and was not accepted.
            if not isinstance(error, (CallError, AlreadyConnectedError)):
                client.close()
                self._every_client.discard(client)
            raise
        required, available = options.pre_start_required, options.get_preferred_allocation_available
        self.endpoints[resource] = Endpoint(client, required, available)
        if self._generation != "1.36":
            self._connected.setdefault(resource, {})[client.path] = self.endpoints[resource]
        if resource in self.tables:  # a new resource gets its table at its first list
            self._serve_from(self.endpoints[resource])
        self._spawn(client)

    def drop_stream(self, resource: str, how: DropKind) -> None:
        """End every ListAndWatch of a resource from the kubelet's side. Raises KeyError if no stream is open."""
        clients = self._watching(resource)
        if not clients:
            raise KeyError(f"no ListAndWatch stream of {resource} is open")
        for client in clients:
            client.drop_stream(how)

    def remove_expired(self) -> bool:
        """Remove resources whose plugin stopped over five minutes ago, as a node status update does.

        Return True if a resource was removed.
        """
        now = self._clock()
        expired = [name for name, state in self.tables.items() if state.grace_over(now)]
        for resource in expired:
            del self.tables[resource]
            self.endpoints.pop(resource, None)
            self._journal.note(EventKind.REMOVED, resource, text="no plugin for over five minutes: capacity 0")
        return bool(expired)

    def drop(self, *, orderly: bool) -> None:
        """Close every connection to a plugin now, with GOAWAY if `orderly`."""
        self._stopping = True
        for client in self._every_client:
            client.close(goaway=orderly)

    async def wait_dropped(self) -> None:
        """Wait until the tasks of the connections that `drop` closed have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _key(self, client: PluginClient) -> tuple[str, str]:
        return client.resource, "" if self._generation == "1.36" else client.path

    def _check_not_connected(self, client: PluginClient) -> None:
        """From 1.37 on, raise AlreadyConnectedError if the client's path is connected.

        The caller then removes every client of the path. The kubelet therefore ignores the end of the connected endpoint's
        stream: the endpoint counts as connected, and the path is refused, until the kubelet restarts.
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
        """Disconnect the client that is stored under the key of `ended`, and stop its resource.

        Do nothing if no client is stored under the key.
        """
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
        self,
        client: PluginClient,
        data: bytes,
        arrived: float,
        before: list[ListedDevice] | None,
    ) -> list[ListedDevice]:
        resource = client.resource
        try:
            devices = parse(data)
        except ValueError as error:
            self._journal.breach(resource, f"a list cannot be decoded: {error}")
            return []
        state = self._table(resource)
        # The plugin may send the newest list again if the kubelet requested a device that is not healthy in that list.
        table = {} if state.requested - state.healthy else state.devices
        state.requested = set()
        for breach in list_breaches(devices, before, table, self._list_again):
            self._journal.breach(resource, breach)
        previous = state.devices
        changed = state.replace(devices)
        text = f"{state.allocatable} healthy of {state.capacity}"
        self._journal.note(
            EventKind.LIST, resource, endpoint=client.path, pid=client.pid, text=text, changed=changed, at=arrived
        )
        gone = previous.keys() - state.devices.keys()
        if before is not None:
            # A plugin refuses devices that only another plugin has listed, so these devices may leave the list.
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
    """Return the process id at the client's endpoint. Endpoints of this process count as different processes: return the path."""
    return client.path if client.pid in (0, os.getpid()) else client.pid
