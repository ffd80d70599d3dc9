"""The kubelet's side of the device plugin API on grpc's C core: it accepts registrations, connects back, and opens streams."""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.plan import PATIENCE, MeasurementError
from gpu_plugin.kubelet import messages, wire

UNHEALTHY = wire.UNHEALTHY.encode()

_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
"""Without this option, channels of the same address would share one connection."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A Register call: the perf_counter() of its arrival, and the path of the plugin's socket."""

    at: float
    socket: Path
    resource: str


@dataclass(frozen=True, slots=True)
class DeviceList:
    """A message of a ListAndWatch stream and the perf_counter() of its arrival."""

    at: float
    payload: bytes

    @property
    def unhealthy(self) -> int:
        """The number of Unhealthy devices, by a search in the bytes: decoding would take longer than the measured time."""
        return self.payload.count(UNHEALTHY)

    def ids(self) -> list[str]:
        """Return its device ids, in order."""
        return [device.id for device in messages.decode(messages.ListAndWatchResponse, self.payload).devices]


def dial(socket: Path) -> grpc.Channel:
    """Return a channel with its own connection."""
    return grpc.insecure_channel(f"unix:{socket}", options=_OWN_CONNECTION)


def unary(channel: grpc.Channel, path: str) -> "grpc.UnaryUnaryMultiCallable[bytes, bytes]":
    """Return a call whose request and answer are bytes."""
    return channel.unary_unary(path, None, None)


class ListStream:
    """An open ListAndWatch with its own connection and its own thread that reads it."""

    def __init__(self, socket: Path) -> None:
        self._channel = dial(socket)
        self._lists: queue.SimpleQueue[DeviceList | None] = queue.SimpleQueue()
        method: Any = self._channel.unary_stream(wire.LIST_AND_WATCH, None, None)
        self._call = method(b"")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(grpc.RpcError):  # code() has the status
            for payload in self._call:
                self._lists.put(DeviceList(time.perf_counter(), payload))
        self._lists.put(None)

    def next(self) -> DeviceList:
        """Return the next list. Raises MeasurementError if no list arrives in time."""
        received = self.within(PATIENCE)
        if received is None:
            raise MeasurementError("no list came on an open stream")
        return received

    def within(self, seconds: float) -> DeviceList | None:
        """Return the next list; None if no list arrives in time. Raises MeasurementError if the stream has ended."""
        try:
            received = self._lists.get(timeout=seconds)
        except queue.Empty:
            return None
        if received is None:
            raise MeasurementError(f"the stream ended with {self._call.code()}")
        return received

    def close(self) -> None:
        """Close the connection, like a kubelet that ends."""
        self._channel.close()
        self._thread.join()


class Kubelet:
    """Listens on kubelet.sock in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._registrations: queue.SimpleQueue[Registration] = queue.SimpleQueue()
        self._workers = ThreadPoolExecutor(2)
        self._server: grpc.Server | None = None

    def listen(self) -> float:
        """Begins to listen. Returns the perf_counter() just before the socket appears."""
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Register": grpc.unary_unary_rpc_method_handler(self._register, None, None)
        }
        server = grpc.server(self._workers)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.Registration", handlers),))
        at = time.perf_counter()
        server.add_insecure_port(f"unix:{self.directory / 'kubelet.sock'}")
        server.start()
        self._server = server
        return at

    def stop(self) -> None:
        """Listens no more and cuts what is under way."""
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def remove_sockets(self) -> None:
        """Empties the directory of sockets, as the kubelet does at its start."""
        for entry in self.directory.iterdir():
            if entry.is_socket():
                entry.unlink(missing_ok=True)

    def registered(self) -> Registration:
        """The next registration. Raises MeasurementError where none comes."""
        try:
            return self._registrations.get(timeout=PATIENCE)
        except queue.Empty:
            raise MeasurementError("nothing registered with the kubelet") from None

    def close(self) -> None:
        """Ends it for good."""
        self.stop()
        self._workers.shutdown()

    def _register(self, request: bytes, context: grpc.ServicerContext) -> bytes:  # noqa: ARG002
        """Dials back before it answers, as the kubelet does."""
        at = time.perf_counter()
        asked = messages.decode(messages.RegisterRequest, request)
        socket = self.directory / asked.endpoint
        with dial(socket) as channel:
            unary(channel, wire.OPTIONS)(b"", timeout=PATIENCE, wait_for_ready=True)
        self._registrations.put(Registration(at, socket, asked.resource_name))
        return wire.EMPTY


@contextmanager
def listening(directory: Path) -> Iterator[Kubelet]:
    """A kubelet that listens, for as long as the context lasts; its own first-use costs are paid before."""
    messages.decode(messages.RegisterRequest, wire.encode_register("a", "b/c"))
    kubelet = Kubelet(directory)
    kubelet.listen()
    try:
        yield kubelet
    finally:
        kubelet.close()
