"""The part of a Kubernetes API server for changes of one Node and Events, like a real server (tests/cluster)."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.unit.cluster.api_server import NODE
from tests.unit.cluster.http_server import TOKEN, HttpServer, status


class WritableServer(HttpServer):
    """Keeps one Node and Events.

    `refusals` has the answers (status, headers) to the next requests. `before` is called before each change,
    to change the Node like another client. `packs` compresses all answers, even if the request does not allow it, and
    `encoding` names the compression.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[str, str] = {"kubernetes.io/hostname": NODE}
        self.conditions: list[dict[str, str]] = [{"type": "Ready", "status": "True"}]
        self.taints: list[dict[str, str]] = []
        self.events: dict[str, dict[str, object]] = {}
        self.pods: dict[str, str] = {}
        self.version = 7
        self.uid = "11111111-2222"
        self.refusals: list[tuple[int, Mapping[str, str]]] = []
        self.requests: list[tuple[str, str, dict[str, str], dict[str, str]]] = []
        self.before = lambda: None
        self.silent = False
        self.packs: Callable[[bytes], bytes] | None = None
        self.encoding = "gzip"
        self._owned: dict[str, set[str]] = {}

    @property
    def asked(self) -> list[str]:
        """Method and path of each request."""
        return [f"{method} {path}" for method, path, _, _ in self.requests]

    def condition(self, kind: str = "GPUHealthy") -> dict[str, str] | None:
        return next((each for each in self.conditions if each["type"] == kind), None)

    def respond(self, writer, method, path, query, headers, body):
        self.requests.append((method, path, query, headers))
        if self.silent:
            return
        code, content, more = self._answer(method, path, query, headers, body)
        data = json.dumps(content).encode()
        if self.packs is not None:
            data, more = self.packs(data), {**more, "Content-Encoding": self.encoding}
        self.send(writer, code, data, **more)

    def _answer(self, method, path, query, headers, body):
        if self.refusals:
            code, more = self.refusals.pop(0)
            return code, status(code, f"{method} is refused"), more
        assert headers["authorization"] == f"Bearer {TOKEN}"
        content: Any = json.loads(body) if body else None
        if path == f"/api/v1/nodes/{NODE}" and method == "GET":
            return 200, self._node(), {}
        if path == f"/api/v1/nodes/{NODE}" and headers["content-type"] == "application/merge-patch+json":
            self.before()
            known = content["metadata"]
            if (known["resourceVersion"], known.get("uid", self.uid)) != (str(self.version), self.uid):
                return 409, status(409, "the object has been modified", "Conflict"), {}
            self.taints = content["spec"]["taints"] or []
            return self._node_changed()
        if path == f"/api/v1/nodes/{NODE}":
            if content["metadata"].get("uid", self.uid) != self.uid:
                return 409, status(409, "uid mismatch", "Conflict"), {}
            self._apply(self.labels, content["metadata"]["labels"], query)
            return self._node_changed()
        if path == f"/api/v1/nodes/{NODE}/status":
            found = {each["type"]: each for each in self.conditions}
            self._apply(found, {each["type"]: each for each in content["status"]["conditions"]}, query)
            self.conditions = [*found.values()]
            return self._node_changed()
        if path.startswith("/api/v1/namespaces/") and method == "GET" and "/pods/" in path:
            name = path.rpartition("/")[2]
            if name in self.pods:
                return 200, {"metadata": {"name": name, "uid": self.pods[name]}}, {}
            return 404, status(404, "pods not found"), {}
        if method == "POST" and path.endswith("/events"):
            name = content["metadata"]["name"]
            if name in self.events:
                return 409, status(409, "already exists", "AlreadyExists"), {}
            self.events[name] = content
            return 201, {"metadata": {"name": name}}, {}
        if method == "PATCH" and "/events/" in path:
            name = path.rpartition("/")[2]
            if name not in self.events:
                return 404, status(404, "events not found"), {}
            self.events[name] |= content
            return 200, {"metadata": {"name": name}}, {}
        return 404, status(404, f"{method} {path} not found"), {}

    def _apply(self, present, wanted, query) -> None:
        """Fields that the manager applied before and does not apply now are removed. Fields of other managers stay."""
        assert query["force"] == "true"
        manager = query["fieldManager"]
        for key in self._owned.get(manager, set()) - set(wanted):
            present.pop(key, None)
        present.update(wanted)
        self._owned[manager] = set(wanted)

    def _node_changed(self):
        self.version += 1
        return 200, {"metadata": {"name": NODE, "uid": self.uid, "resourceVersion": str(self.version)}}, {}

    def _node(self):
        metadata = {"name": NODE, "uid": self.uid, "resourceVersion": str(self.version), "labels": self.labels}
        return {"metadata": metadata, "spec": {"taints": self.taints}, "status": {"conditions": self.conditions}}
