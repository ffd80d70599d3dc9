"""The plugin's changes in the Kubernetes API: labels, one condition and one taint of its own Node, and Events.

Labels and the condition use server-side apply, each with its own field manager: the API server removes the fields that we no
longer apply, and keeps the fields of other owners. Taints cannot use it, since the list as a whole has one owner
(`x-kubernetes-list-type: atomic`, core/v1 NodeSpec). So other programs' taints are read and written back, and the API server
refuses the change if the Node has changed since then.

No connection stays open between two tasks, since credentials and certificates are replaced while the plugin runs.
"""

import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final

import anyio
import msgspec

from gpu_plugin.cluster.connection import WHOLE, Connection, UnreachableError, connect
from gpu_plugin.runtime.backoff import NO_SOONER, Backoff

log = logging.getLogger(__name__)

MANAGER: Final = "gpu-plugin"  # the field manager of Events; the field managers of the Node's fields begin with it

# Attempts for each request, and seconds between two attempts: at first, and at most, also if Retry-After is longer.
# Up to half of the pause is added at random, so that the nodes of a cluster do not send their requests together.
ATTEMPTS = 4
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0

_APPLY: Final = {"Content-Type": "application/apply-patch+yaml"}
_MERGE: Final = {"Content-Type": "application/merge-patch+json"}

_EXISTS: Final = "AlreadyExists"  # the reason of a conflict because an object of this name exists (metav1.StatusReason)

# The connection of a task that makes several requests.
_connection: "ContextVar[Connection | None]" = ContextVar("connection", default=None)

# A taint of a Node (core/v1 Taint) as it was read. Other programs' taints are written back with all of their fields.
Taint = dict[str, Any]


class _Metadata(msgspec.Struct, rename="camel"):
    uid: str = ""
    resource_version: str = ""


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """A condition of a Node (core/v1 NodeCondition). Times are RFC 3339 in whole seconds, as the API server stores them.

    Other programs may have written null for an unknown time or reason.
    """

    type: str = ""
    status: str = ""
    reason: str | None = ""
    message: str | None = ""
    last_heartbeat_time: str | None = ""
    last_transition_time: str | None = ""


class _Spec(msgspec.Struct):
    taints: list[Taint] | None = None


class _State(msgspec.Struct):
    conditions: list[Condition] | None = None


class NodeState(msgspec.Struct):
    """The fields of a Node that the plugin reads."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _State = msgspec.field(default_factory=_State)

    @property
    def taints(self) -> Sequence[Taint]:
        """All taints of the Node, including other programs' taints."""
        return self.spec.taints or ()

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of this type; None if the Node does not have it."""
        return next((each for each in self.status.conditions or () if each.type == kind), None)


class NodeApi:
    """Changes our own Node, and writes Events. Every method raises UnreachableError after its last attempt.

    A request is sent up to ATTEMPTS times if the server is busy or restarts, or if the object has changed. After that, the caller
    decides when to try again. `requests` is the number of requests, `failures` the number of failed requests.
    """

    def __init__(self, node_name: str, kubeconfig: str = "", dice: Callable[[], float] = random.random) -> None:
        """If `kubeconfig` is empty, use the pod's own service account. `dice` returns a random number in [0, 1) for pauses."""
        self.node_name = node_name
        self.requests = 0
        self.failures = 0
        self._kubeconfig = kubeconfig
        self._dice = dice
        self._path = f"/api/v1/nodes/{node_name}"
        self._uid = ""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Connection]:
        """Send all requests of this task over one connection. Raises UnreachableError."""
        if (opened := _connection.get()) is not None:
            yield opened
            return
        async with connect(self._kubeconfig) as connection:
            mine = _connection.set(connection)
            try:
                yield connection
            finally:
                _connection.reset(mine)

    async def read(self) -> NodeState:
        """Read the whole Node. It is long, so read it only at the start and before a change that needs its fields."""
        return await self._ask("GET", self._path, headers=WHOLE)

    async def apply_labels(self, labels: Mapping[str, str]) -> None:
        """Replace all of our labels on the Node by these labels. If `labels` is empty, all of our labels are removed.

        If another program wrote a label of the same key, that label becomes ours.
        """
        if self._uid:
            try:
                await self._apply_labels(labels)
            except UnreachableError as error:
                if error.code not in {HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND}:
                    raise
            else:
                return
        self._uid = (await self._ask("GET", self._path)).metadata.uid  # not known, or the Node was recreated
        await self._apply_labels(labels)

    async def apply_condition(self, condition: Condition | None) -> str:
        """Write our condition, or remove it if None. Returns the Node's uid, which changes if the Node is recreated."""
        conditions = [] if condition is None else [msgspec.to_builtins(condition)]
        content = {"metadata": {"name": self.node_name}, "status": {"conditions": conditions}}
        return (await self._apply("/status", "condition", content)).metadata.uid

    async def set_taint(self, key: str, effect: str, known: NodeState | None = None) -> bool:
        """Set the effect of our taint, or remove the taint if the effect is empty. No other taint is changed.

        Args:
            key: the taint's key. All taints with this key are ours.
            effect: NoSchedule, PreferNoSchedule, NoExecute, or empty.
            known: the Node as it was read a moment ago. If it has changed since then, it is read again.

        Returns:
            True if the Node was changed.
        """
        wanted: list[Taint] = [{"key": key, "effect": effect}] if effect else []
        path = f"{self._path}?fieldManager={MANAGER}-taint"
        for attempt in range(1, ATTEMPTS + 1):
            state = known or await self.read()
            known = None
            present = [taint.get("effect") for taint in state.taints if taint.get("key") == key]
            if present == [taint["effect"] for taint in wanted]:
                return False
            others = [taint for taint in state.taints if taint.get("key") != key]
            content = {
                "metadata": {"resourceVersion": state.metadata.resource_version, "uid": state.metadata.uid},
                "spec": {"taints": [*others, *wanted] or None},
            }
            try:
                await self._ask("PATCH", path, content, _MERGE)
                break
            except UnreachableError as error:
                if error.code != HTTPStatus.CONFLICT or attempt == ATTEMPTS:
                    raise
        return True

    async def create_event(self, namespace: str, event: Mapping[str, object]) -> None:
        """Create an Event (core/v1).

        If an Event of this name exists, an earlier attempt created it although no answer arrived.
        """
        path = f"/api/v1/namespaces/{namespace}/events?fieldManager={MANAGER}"
        try:
            await self._ask("POST", path, event)
        except UnreachableError as error:
            if error.reason != _EXISTS:
                raise

    async def count_event(self, namespace: str, name: str, changes: Mapping[str, object]) -> bool:
        """Change fields of an Event. Returns False if the API server has removed the Event because of its age."""
        path = f"/api/v1/namespaces/{namespace}/events/{name}?fieldManager={MANAGER}"
        return await self._unless_gone("PATCH", path, changes, _MERGE) is not None

    async def pod_uid(self, namespace: str, name: str) -> str | None:
        """Read the uid of a pod, from its metadata only; None if no pod has this name."""
        pod = await self._unless_gone("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        return None if pod is None else pod.metadata.uid or None

    async def _apply(self, subresource: str, concern: str, content: Mapping[str, object]) -> NodeState:
        path = f"{self._path}{subresource}?fieldManager={MANAGER}-{concern}&force=true"
        return await self._ask("PATCH", path, {"apiVersion": "v1", "kind": "Node", **content}, _APPLY)

    async def _apply_labels(self, labels: Mapping[str, str]) -> None:
        # With the uid, the API server refuses a Node that is gone or was recreated. Else it would create the Node.
        metadata = {"name": self.node_name, "uid": self._uid, "labels": {**labels}}
        await self._apply("", "labels", {"metadata": metadata})

    async def _unless_gone(
        self, method: str, path: str, content: object = None, headers: Mapping[str, str] | None = None
    ) -> NodeState | None:
        """Return the object; None if it does not exist. Raises UnreachableError."""
        try:
            return await self._ask(method, path, content, headers)
        except UnreachableError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return None

    async def _ask(
        self, method: str, path: str, content: object = None, headers: Mapping[str, str] | None = None
    ) -> NodeState:
        """Send a request up to ATTEMPTS times and return the object. Only a Node has more than metadata."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, NO_SOONER)
        async with self.session() as connection:
            while True:
                self.requests += 1
                try:
                    return await connection.ask(method, path, NodeState, content, headers)
                except UnreachableError as error:
                    self.failures += 1
                    # After a conflict, the caller of a merge must read the object again.
                    final = not _is_transient(error) or (error.code == HTTPStatus.CONFLICT and headers is _MERGE)
                    if final or backoff.failures + 1 == ATTEMPTS:
                        raise
                    log.debug("%s %s: %s; sending the request again", method, path, error)
                    now, dice = anyio.current_time(), self._dice()
                    pause = backoff.failed(now, dice)
                    if error.pause is not None:
                        pause = Backoff(error.pause, LONGEST_PAUSE, NO_SOONER).failed(now, dice)
                await anyio.sleep(pause)


def _is_transient(error: UnreachableError) -> bool:
    """Whether the same request may soon succeed: no answer, a busy or failing server, or an object that has changed."""
    if not error.code:
        return error.kind != "answer"
    if error.code == HTTPStatus.CONFLICT:
        return error.reason != _EXISTS
    return error.code in {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS} or error.code >= 500
