"""Add the reports of the parts to the event store as events, and answer `gpu-plugin events`."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.devices.gpu_names import named, short_bus_id
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Transition
from gpu_plugin.health.wording import news
from gpu_plugin.kubelet.registrations import UNHEARD, UNREGISTERED, ResourceRegistration
from gpu_plugin.runtime.control import RefusedError
from gpu_plugin.runtime.control.server import Verb, asking
from gpu_plugin.state.event_store import Event, EventStore
from gpu_plugin.telemetry.health_reports import whose

if TYPE_CHECKING:
    from gpu_plugin.status import model

LONGEST_REPLY = 900_000
"""Limit in bytes for the events in one reply of the control socket, whose own limit is 1 MiB."""

LONGEST_REASON = 200
"""Limit in characters for the reason of an order."""

LOGGED_VERBS = frozenset({"cordon", "uncordon", "release", "resume", "fault"})
"""Verbs of the control socket that change something. The log stores these orders with the user and process that sent them."""

REASONED = frozenset({"cordon"})
"""Orders that receive the reason of the request and store it with the GPU's health."""


class EventLog:
    """Receives events on the event loop. Only the reply to an order waits, until the event is written."""

    def __init__(self, store: EventStore, operations: Operations) -> None:
        """`store` keeps the events. `operations` has the GPUs that orders may name."""
        self.store = store
        self._operations = operations
        self._refused = ""
        self._applied = 0

    def daemon(self, text: str) -> None:
        """Add an event about this process or the driver."""
        self.store.add("daemon", text)

    def health(self, change: Transition) -> None:
        """Add a change of a signal's verdict."""
        text = news(change, whose(change.uuid, self._operations.gpus, change.device)).text
        fields = {"device": change.device, "signal": change.signal, "verdict": change.verdict.name, "xid": change.xid}
        self.store.add("health", text, **self._about(change.uuid), **fields)

    def registration(self, resource: str, before: ResourceRegistration, after: ResourceRegistration) -> None:
        """Add a change of a resource's registration with the kubelet."""
        if after.registered is not None:
            if before.registered is None:
                self.store.add("registration", f"{resource}: registered with the kubelet", resource=resource)
        elif before.why != after.why and after.why not in (UNHEARD, UNREGISTERED):
            how = "no longer registered" if before.registered is not None else "not registered"
            self.store.add("registration", f"{resource}: {how}: {after.why}", resource=resource)

    def configuration(self, status: "model.Configuration") -> None:
        """Add the result of a read of the configuration."""
        refused, applied = status.refused, status.reloads["applied"]
        if self._refused and not refused and applied == self._applied:
            self.store.add("configuration", "nothing is refused any more: the requested configuration is in force")
        if applied > self._applied:
            self._applied = applied
            self.store.add("configuration", f"applied: {status.file or 'flags and environment'}")
        if refused and refused != self._refused:
            why = "; ".join(status.faults) or refused
            self.store.add("configuration", f"refused; the former configuration stays in force: {why}")
        self._refused = refused

    def resolved(self, verb: Verb) -> Verb:
        """Return a verb that replaces `gpu` of a request by the GPU's uuid, or by its bus id if it has no uuid.

        A request that names no known GPU is passed on unchanged.
        """

        async def asked(request: Mapping[str, object]) -> Mapping[str, object]:
            return await verb(self._resolve(request))

        return asked

    def order(self, name: str, verb: Verb) -> Verb:
        """Return a verb that also logs each request: the order, the peer, `reason` of the request, and the outcome."""

        async def ordered(request: Mapping[str, object]) -> Mapping[str, object]:
            reason = request.get("reason", "")
            if not isinstance(reason, str) or len(reason) > LONGEST_REASON or not reason.isprintable():
                raise ConfigError(f"reason: a text of at most {LONGEST_REASON} characters, all of them printable")
            peer = asking.get()
            asked = self._resolve({field: value for field, value in request.items() if field != "reason"})
            about = self._about_order(asked)  # before the order, which may drop the GPU from memory
            try:
                reply = await verb({**asked, "reason": reason} if reason and name in REASONED else asked)
            except (ConfigError, RefusedError) as error:
                self.store.add("order", f"{name}: refused: {error}", **about, by=str(peer), reason=reason)
                await self.store.written()
                raise
            outcome = str(reply.get("outcome") or reply.get("done", ""))
            self.store.add("order", f"{name}: {outcome}", **about, by=str(peer), reason=reason)
            await self.store.written()
            return reply

        return ordered

    async def answer(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Answer the verb `events`: return the stored events, oldest first. If the request has `gpu`, only events of this GPU.

        If the events exceed LONGEST_REPLY, the reply lacks the oldest events. `left_out` is their number.
        """
        if unknown := set(request) - {"gpu"}:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not a field of this verb")
        asked = self._events_of(request.get("gpu"))
        sent: list[object] = []
        room = LONGEST_REPLY
        for event in reversed(asked):
            content = msgspec.to_builtins(event)
            room -= len(json.dumps(content))
            if room < 0:
                break
            sent.append(content)
        return {"events": sent[::-1], "left_out": len(asked) - len(sent)}

    def _events_of(self, name: object) -> Sequence[Event]:
        """Return the events of the GPU with this name, which may be gone by now; all events for None.

        Raises:
            ConfigError: neither a GPU of the node nor a stored event has this name.
            RefusedError: no stored event has this name, and no GPU of the node is known yet.
        """
        if name is None:
            return tuple(self.store.events)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ConfigError(f"gpu: {name!r} is neither an index, a uuid nor a PCI bus id")
        gone = {event.uuid: Gpu(event.uuid, event.index or 0, pci_bus_id=event.bus_id) for event in self.store.events}
        found = named(name, self._operations.gpus) or named(name, [gpu for uuid, gpu in gone.items() if uuid])
        if found is None and not self._operations.gpus:
            raise RefusedError(f"GPU {name}: no GPU of this node is known yet, and no stored event is about this GPU")
        if found is None:
            raise ConfigError(f"GPU {name}: no GPU of this node has this name, and no stored event is about such a GPU")
        return [event for event in self.store.events if event.uuid == found.uuid]

    def _resolve(self, request: Mapping[str, object]) -> Mapping[str, object]:
        name = request.get("gpu")
        if isinstance(name, bool) or not isinstance(name, str | int):
            return request
        found = named(name, (*self._operations.gpus, *self._operations.gone()))
        if found is None or name == found.index:  # the verb refuses an index that two GPUs have
            return request
        return {**request, "gpu": found.uuid or short_bus_id(found.pci_bus_id)}

    def _about_order(self, request: Mapping[str, object]) -> dict[str, Any]:
        asked = request.get("gpu")
        uuid = (
            asked
            if isinstance(asked, str)
            else next((gpu.uuid for gpu in self._operations.gpus if gpu.index == asked), "")
        )
        return self._about(uuid)

    def _of(self, uuid: str) -> Gpu | None:
        return next((gpu for gpu in self._operations.gpus if gpu.uuid == uuid), None)

    def _about(self, uuid: str) -> dict[str, Any]:
        found = self._of(uuid)
        if found is not None:
            return {"uuid": uuid, "index": found.index, "bus_id": short_bus_id(found.pci_bus_id)}
        bus_ids = (short_bus_id(gpu.pci_bus_id) for gpu in self._operations.gone() if gpu.uuid == uuid != "")
        return {"uuid": uuid, "bus_id": next(bus_ids, "")}
