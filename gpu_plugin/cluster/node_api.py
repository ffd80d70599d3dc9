"""What the plugin changes in the Kubernetes API: of its own Node the labels, one condition and one taint; and Events.

Labels and the condition are server-side applied, each under a field manager of its own: what we no longer apply goes, what
others own stays. Taints cannot be: the list as a whole has one owner (`x-kubernetes-list-type: atomic`, core/v1 NodeSpec), so
the others' are read and kept, and the API server refuses the change where the Node has changed since.

Nothing is kept open between two tasks: credentials and certificates are read again, as they are replaced while we run.
"""

import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from gpu_plugin.cluster.answers import METADATA, Metadata, Request, ask, decoded
from gpu_plugin.cluster.connection import UnreachableError, connect
from gpu_plugin.runtime.backoff import NO_SOONER, Backoff

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

MANAGER: Final = "gpu-plugin"
"""Field manager of what is not applied; those of what is have this beginning."""

# Requests that one change may take, and seconds between two of them: at first, and at most, whatever Retry-After says.
# Up to half as long is added, which keeps a cluster's nodes apart.
ATTEMPTS = 4
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0

_APPLY: Final = {"Content-Type": "application/apply-patch+yaml", **METADATA}
_MERGE: Final = {"Content-Type": "application/merge-patch+json", **METADATA}
_JSON: Final = {"Content-Type": "application/json", **METADATA}

_NODES_RIGHT: Final = "get and patch of nodes in the core API group"

_EXISTS: Final = "AlreadyExists"
"""The reason of a conflict with an object that was there before, and not with a change of it (metav1.StatusReason)."""

_AGAIN = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})

_client: "ContextVar[httpx2.AsyncClient | None]" = ContextVar("client", default=None)
"""The connection of a task that makes several requests."""

Taint = dict[str, Any]
"""A taint of a Node (core/v1 Taint) as it was read: others' are written back with every field that they have."""


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """A condition of a Node (core/v1 NodeCondition). Times are RFC 3339 in whole seconds, as the API server keeps them.

    Others may have written null where a time or a reason is not known.
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
    """As much of a Node as is decided by."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _State = msgspec.field(default_factory=_State)

    @property
    def taints(self) -> Sequence[Taint]:
        """All taints of the Node, ours and others'."""
        return self.spec.taints or ()

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type; None where there is none."""
        return next((each for each in self.status.conditions or () if each.type == kind), None)


class NodeApi:
    """Changes to our own Node, and Events. Everything raises UnreachableError once it was tried in vain.

    A change is tried a few times where the server is busy, restarts, or the object has changed meanwhile; when one that failed is
    made again is for the caller to say. `failures` counts requests that were in vain, `requests` all of them.
    """

    def __init__(self, node_name: str, kubeconfig: str = "", dice: Callable[[], float] = random.random) -> None:
        """Takes the Node's name, a path (empty: the pod's own service account), and what spreads a cluster's nodes, in [0, 1)."""
        self.node_name = node_name
        self.requests = 0
        self.failures = 0
        self._kubeconfig = kubeconfig
        self._dice = dice
        self._uid = ""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Has the requests of one task made over one connection. Raises UnreachableError."""
        if _client.get() is not None:
            yield
            return
        async with connect(self._kubeconfig) as client:
            mine = _client.set(client)
            try:
                yield
            finally:
                _client.reset(mine)

    async def read(self) -> NodeState:
        """The Node as it is now. It is long: for the start, and for what is changed by reading it first."""
        request = Request("GET", self._path(), {"Accept": "application/json"}, "get", "get of nodes")
        return decoded(await self._ask(request), NodeState)

    async def apply_labels(self, labels: Mapping[str, str]) -> None:
        """Has the Node carry exactly these of our labels: those applied before and not named now are removed.

        A label of the same key that somebody else wrote becomes ours. None at all: nothing of us is left.
        """
        known = self._uid
        try:
            await self._apply_labels(labels)
        except UnreachableError as error:
            self._uid = ""
            if not known or error.code not in {HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND}:
                raise
            await self._apply_labels(labels)  # the Node of this name was recreated since

    async def apply_condition(self, condition: Condition | None) -> str:
        """Has the Node carry this condition of ours, or none. Returns the Node's uid: one that was recreated has another."""
        conditions = [] if condition is None else [msgspec.to_builtins(condition)]
        content = {"metadata": {"name": self.node_name}, "status": {"conditions": conditions}}
        answer = await self._apply("/status", "condition", content, "patch of nodes/status in the core API group")
        return decoded(answer, NodeState).metadata.uid

    async def set_taint(self, key: str, effect: str, known: NodeState | None = None) -> bool:
        """Has the Node carry one taint of this key, with this effect, or (empty) none; no other taint is touched.

        Args:
            key: is ours alone, whatever the effect.
            effect: NoSchedule, PreferNoSchedule, NoExecute, or empty.
            known: the Node as it was read a moment ago; where it has changed since, it is read again.

        Returns:
            Whether there was anything to change.
        """
        wanted: list[Taint] = [{"key": key, "effect": effect}] if effect else []
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, NO_SOONER)
        while True:
            state = known if known is not None else await self.read()
            known = None
            present = [taint for taint in state.taints if taint.get("key") == key]
            if [taint.get("effect") for taint in present] == [taint["effect"] for taint in wanted]:
                return False
            others = [taint for taint in state.taints if taint.get("key") != key]
            content = {
                "metadata": {"resourceVersion": state.metadata.resource_version, "uid": state.metadata.uid},
                "spec": {"taints": [*others, *wanted] or None},
            }
            path = f"{self._path()}?fieldManager={MANAGER}-taint"
            try:
                await self._ask(Request("PATCH", path, _MERGE, "patch", _NODES_RIGHT, content), again_on_conflict=False)
            except UnreachableError as error:
                if error.code != HTTPStatus.CONFLICT or backoff.failures + 1 == ATTEMPTS:
                    raise
                await self._pause(backoff, error.pause)
            else:
                return True

    async def create_event(self, namespace: str, event: Mapping[str, object]) -> None:
        """Makes an Event (core/v1). One that is there already by this name was made by an attempt that seemed to fail."""
        path = f"/api/v1/namespaces/{namespace}/events?fieldManager={MANAGER}"
        try:
            await self._ask(Request("POST", path, _JSON, "create events", _events_right(namespace), event))
        except UnreachableError as error:
            if error.reason != _EXISTS:
                raise

    async def count_event(self, namespace: str, name: str, changes: Mapping[str, object]) -> bool:
        """Changes fields of an Event. Returns whether it is still there: the API server drops old ones."""
        path = f"/api/v1/namespaces/{namespace}/events/{name}?fieldManager={MANAGER}"
        request = Request("PATCH", path, _MERGE, "patch events", _events_right(namespace), changes)
        return await self._unless_gone(request) is not None

    async def pod_uid(self, namespace: str, name: str) -> str | None:
        """The uid of a pod, by its metadata alone; None where there is none of that name any more."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        request = Request("GET", path, METADATA, "get pods", "get of pods in the core API group")
        content = await self._unless_gone(request)
        return None if content is None else decoded(content, NodeState).metadata.uid or None

    def _path(self) -> str:
        return f"/api/v1/nodes/{self.node_name}"

    async def _apply(self, subresource: str, concern: str, content: Mapping[str, object], needed: str) -> bytes:
        path = f"{self._path()}{subresource}?fieldManager={MANAGER}-{concern}&force=true"
        document = {"apiVersion": "v1", "kind": "Node", **content}
        return await self._ask(Request("PATCH", path, _APPLY, f"patch {concern}", needed, document))

    async def _apply_labels(self, labels: Mapping[str, str]) -> None:
        """With the Node's uid: applying to a Node that is gone makes no new one then, and one that was recreated is noticed."""
        if not self._uid:
            request = Request("GET", self._path(), METADATA, "get", "get of nodes in the core API group")
            self._uid = decoded(await self._ask(request), NodeState).metadata.uid
        metadata = {"name": self.node_name, "uid": self._uid, "labels": {**labels}}
        await self._apply("", "labels", {"metadata": metadata}, _NODES_RIGHT)

    async def _unless_gone(self, request: Request) -> bytes | None:
        """The body of the answer; None where there is no such object. Raises UnreachableError."""
        try:
            return await self._ask(request)
        except UnreachableError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return None

    async def _ask(self, request: Request, *, again_on_conflict: bool = True) -> bytes:
        """The body of the answer, after a few attempts if need be. Raises UnreachableError.

        Without `again_on_conflict` that is raised at once where the object has changed meanwhile: the caller must read it again.
        """
        async with self.session():
            client = _client.get()
            assert client is not None
            backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, NO_SOONER)
            while True:
                self.requests += 1
                try:
                    return await ask(client, request)
                except UnreachableError as error:
                    self.failures += 1
                    for_good = not _may_pass(error) or (error.code == HTTPStatus.CONFLICT and not again_on_conflict)
                    if for_good or backoff.failures + 1 == ATTEMPTS:
                        raise
                    log.debug("%s %s: %s; asking again", request.method, request.path, error)
                    await self._pause(backoff, error.pause)

    async def _pause(self, backoff: Backoff, asked: float | None) -> None:
        """Waits after a failure; `asked`: for so many seconds, as the server wants it, instead."""
        now, dice = anyio.current_time(), self._dice()
        pause = backoff.failed(now, dice)
        if asked is not None:
            pause = Backoff(asked, LONGEST_PAUSE, NO_SOONER).failed(now, dice)
        await anyio.sleep(pause)


def _may_pass(error: UnreachableError) -> bool:
    """Whether the same may well succeed in a moment: nobody answered, or the server is busy, or the object has changed since."""
    changed_since = error.code == HTTPStatus.CONFLICT and error.reason != _EXISTS
    return not error.code or changed_since or error.code in _AGAIN or error.code >= HTTPStatus.INTERNAL_SERVER_ERROR


def _events_right(namespace: str) -> str:
    return f"create and patch of events in the core API group, in namespace {namespace}"
