"""A node's root directory as a test makes it."""

import os
import socket
from pathlib import Path


class NodeTree:
    """Writes files below the root directory of a made-up node, by the node's own paths."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, path: str, content: str | bytes = "") -> str:
        file = self._place(path)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def link(self, path: str, target: str) -> None:
        self._place(path).symlink_to(target)

    def fifo(self, path: str) -> None:
        os.mkfifo(self._place(path))

    def listen(self, path: str) -> None:
        """A socket; made from within its directory, since a test's own may be too long for sun_path."""
        place = self._place(path)
        before = Path.cwd()
        os.chdir(place.parent)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(place.name)
        finally:
            os.chdir(before)

    def package(self, *stanzas: tuple[str, str, str]) -> None:
        """dpkg's record of packages: name, state and version of each."""
        self.put(
            "/var/lib/dpkg/status",
            "".join(
                f"Package: {name}\nStatus: {state}\nPriority: optional\nVersion: {version}\nDescription: x\n more\n\n"
                for name, state, version in stanzas
            ),
        )

    def _place(self, path: str) -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        return file
