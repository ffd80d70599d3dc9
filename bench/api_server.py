"""A minimal Kubernetes API server for a daemon that follows its Node: it returns metadata, and sends no event to a watch."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.plan import PATIENCE, MeasurementError

NODE = "node"

_INSECURE = {"insecure-skip-tls-verify": True}
"""The server has no TLS. So the client does not load the system's certificate authorities; in a pod it would load only one."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running server. `kubeconfig` is a file with its address."""

    kubeconfig: Path
    watched: threading.Event

    def wait(self) -> None:
        """Wait until the Node is watched. Raises MeasurementError if it is not watched in time."""
        if not self.watched.wait(PATIENCE):
            raise MeasurementError("the daemon watches no Node")
        self.watched.clear()


@contextmanager
def serving_api(directory: Path) -> Iterator[ApiServer]:
    """Run the server until the context ends."""
    watched, ended = threading.Event(), threading.Event()

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if "watch=true" in self.path:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                watched.set()
                ended.wait()
                self.close_connection = True
                return
            node = {"kind": "PartialObjectMetadata", "metadata": {"name": NODE, "resourceVersion": "1"}}
            content = json.dumps(node).encode()
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name in http.server
            """Log no requests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield ApiServer(_kubeconfig(directory / "kubeconfig", server.server_port), watched)
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _kubeconfig(file: Path, port: int) -> Path:
    content = {
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}", **_INSECURE}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {"token": "none"}}],
    }
    file.write_text(json.dumps(content))
    return file
