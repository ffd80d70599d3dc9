"""Write images for the cluster as OCI archives, so that no image is pulled or built. The main image is a static busybox.

The archive has the layout of the OCI image specification (image-layout), with one uncompressed layer and one manifest.
"""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

from .process import run

IMAGE = "localhost/gpu-plugin-e2e/busybox:1"

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_busybox(path: Path, *, busybox: Path) -> None:
    """Write the image of a statically linked busybox of this machine to `path`.

    Its default command sleeps for ever, so that the image is also used for the sandbox (pause) container.
    """
    _write_archive(path, IMAGE, _layer(busybox.read_bytes(), run([str(busybox), "--list"]).split()))


def write_directory(path: Path, name: str, root: Path) -> None:
    """Write an image called `name` to `path` that has the files below `root`."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as layer:
        layer.add(root, arcname=".")
    _write_archive(path, name, file.getvalue())


def _write_archive(path: Path, name: str, layer: bytes) -> None:
    architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
    config = _json(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": ["PATH=/bin:/usr/bin"], "Cmd": ["/bin/sleep", "infinity"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
        }
    )
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest) | {
        "platform": {"architecture": architecture, "os": "linux"},
        "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name},
    }
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in (layer, config, manifest):
            _add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)


def _layer(busybox: bytes, applets: list[str]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as layer:
        for name, mode in (
            ("bin", 0o755),
            ("dev", 0o755),
            ("etc", 0o755),
            ("proc", 0o555),
            ("sys", 0o555),
            ("tmp", 0o1777),
        ):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, mode
            layer.addfile(directory)
        _add(layer, "bin/busybox", busybox, mode=0o755)
        for applet in applets:
            if applet != "busybox":
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                layer.addfile(link)
    return file.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def _descriptor(media_type: str, content: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
