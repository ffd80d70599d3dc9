"""As much of a Kubernetes API server as following a node's labels needs, and every way in which one can fail."""

import asyncio
import json
import zlib
from typing import Any

from tests.unit.cluster.http_server import TOKEN, HttpServer, status

NODE = "node-a"
LABEL = "nvidia.com/device-plugin.config"


class FakeApiServer(HttpServer):
    """Serves the metadata of one node, and watches of it. May be stopped and started between."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[str, str] | None = {}
        self.annotations: dict[str, str] = {}
        self.version = 1000
        self.refusals: list[tuple[str, int]] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, str]]] = []
        self.token = TOKEN
        self.silent = False
        self.wrong: list[bytes] = []
        self.ends_at_once = False
        self.packs = False
        self._watchers: set[asyncio.StreamWriter] = set()
        self._packers: dict[asyncio.StreamWriter, Any] = {}

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def verbs(self) -> list[str]:
        return [verb for verb, _, _ in self.requests]

    def label(self, value: str | None) -> None:
        """Set or remove the label, and send it to the watchers."""
        self.labels = {} if value is None else {LABEL: value}
        self.tell("MODIFIED")

    def tell(self, kind: str) -> None:
        self.version += 1
        self.event(kind, self._node())

    def remove(self) -> None:
        """Deletes the node."""
        self.tell("DELETED")
        self.labels = None

    def expire(self) -> None:
        """Send the server's error for an expired version."""
        self.version += 1
        self.event("ERROR", status(410, "too old resource version"))

    def event(self, kind: str, content: dict[str, object]) -> None:
        for writer in self._watchers:
            self._write_event(writer, kind, content)

    def break_streams(self) -> None:
        """Ends every watch in the middle of an event."""
        for writer in tuple(self._watchers):
            writer.write(b'14\r\n{"type": "MODIFIED",\r\n')
            writer.transport.abort()

    def end_streams(self) -> None:
        """Ends every watch as a server does whose time is up."""
        for writer in tuple(self._watchers):
            writer.write(b"0\r\n\r\n")
            self._watchers.discard(writer)
        self.ring()

    def closed(self, writer) -> None:
        self._watchers.discard(writer)

    def respond(self, writer, method, path, query, headers, body):
        verb = "watch" if query.get("watch") == "true" else "get"
        self.requests.append((verb, query, headers))
        self.ring()
        if self.silent:
            return
        ours = query.get("fieldSelector") == f"metadata.name={NODE}" or path == f"/api/v1/nodes/{NODE}"
        version = query.get("resourceVersion")
        if method != "GET" or not path.startswith("/api/v1/nodes") or (verb == "watch") != (path == "/api/v1/nodes"):
            self._refuse(writer, 404, f"{method} {path} is not known")
        elif headers.get("authorization") != f"Bearer {self.token}":
            self._refuse(writer, 401, "Unauthorized")
        elif self.refusals and self.refusals[0][0] == verb:
            self._refuse(writer, self.refusals.pop(0)[1], f'nodes is forbidden: "us" cannot {verb} resource "nodes"')
        elif verb == "get" and self.wrong:
            self.send(writer, 200, self.wrong.pop())
        elif verb == "get" and (not ours or self.labels is None):
            self._refuse(writer, 404, "nodes not found")
        elif verb == "get":
            self.send(writer, 200, self._node())
        elif version is None:  # as with an etcd before 3.4.25
            self._refuse(writer, 500, "the required storage feature RequestWatchProgress is disabled")
        elif version not in ("0", str(self.version)):
            self._refuse(writer, 410, "too old resource version")
        else:
            lines = ["HTTP/1.1 200 OK", "Content-Type: application/json", "Transfer-Encoding: chunked"]
            if self.packs:
                lines += ["Content-Encoding: gzip"]
                self._packers[writer] = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
            writer.write("\r\n".join([*lines, "", ""]).encode())
            if self.ends_at_once:
                writer.write(b"0\r\n\r\n")
            else:
                self._watchers.add(writer)
                if ours and self.labels is not None and version == "0":
                    self._write_event(writer, "ADDED", self._node())
                self.ring()

    def _refuse(self, writer, code: int, message: str) -> None:
        self.send(writer, code, status(code, message))

    def line(self, line: bytes) -> None:
        """Send a line to each watcher."""
        for writer in self._watchers:
            self._write_line(writer, line)

    def _write_event(self, writer: asyncio.StreamWriter, kind: str, content: dict[str, object]) -> None:
        self._write_line(writer, json.dumps({"type": kind, "object": content}).encode())

    def _write_line(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        line += b"\n"
        if (packer := self._packers.get(writer)) is not None:
            line = packer.compress(line) + packer.flush(zlib.Z_SYNC_FLUSH)
        middle = len(line) // 2  # in two pieces, as networks deliver
        for piece in (line[:middle], line[middle:]):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    def _node(self) -> dict[str, object]:
        metadata: dict[str, object] = {
            "name": NODE,
            "resourceVersion": str(self.version),
            "annotations": {"a": "b", **self.annotations},
        }
        if self.labels:
            metadata["labels"] = {**self.labels, "kubernetes.io/hostname": NODE}
        return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
