"""Checks this plugin's own specifications before they are written. `spec.faults` has the rules of CDI itself."""

from collections import Counter
from collections.abc import Iterable, Iterator
from posixpath import normpath

from gpu_plugin.containers.cdi.spec import MAX_BYTES, Edits, Spec, faults, from_json, to_json

LONGEST_PATH = 4095  # bytes, without the NUL at the end (PATH_MAX in linux/limits.h)
MAX_NAMED_FAULTS = 3  # the most faults of one specification in an error message

# Mount options that this plugin uses (mount(8)). Every mount must be read-only.
_OPTIONS = frozenset(("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate"))


def encoded(spec: Spec) -> bytes:
    """Check and encode a specification. Raises ValueError with the faults if it must not be written."""
    try:
        content = to_json(spec)
    except UnicodeEncodeError:
        raise ValueError("a name in it is not text in UTF-8") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has {len(content):,} bytes, and only {MAX_BYTES:,} bytes of a specification are read")
    read = from_json(content)  # by the JSON Schema
    found = [*faults(read), *own_faults(read)]
    if found:
        more = f"; and {len(found) - MAX_NAMED_FAULTS} more faults" if len(found) > MAX_NAMED_FAULTS else ""
        raise ValueError("; ".join(found[:MAX_NAMED_FAULTS]) + more)
    return content


def own_faults(spec: Spec) -> Iterator[str]:
    """Yield a sentence for each fault by this plugin's own rules, which CDI's rules allow."""
    common = spec.container_edits
    yield from _edits_faults("$.containerEdits", common)
    for at, device in enumerate(spec.devices):
        place, own = f"$.devices[{at}].containerEdits", device.container_edits
        yield from _edits_faults(place, own)
        for what, first, second in (
            ("mounts", _mounted(common), _mounted(own)),
            ("device nodes", _nodes(common), _nodes(own)),
        ):
            for path in sorted(set(first) & set(second)):
                yield f"{place}: {path!r} is also among the {what} of all devices"


def _edits_faults(place: str, edits: Edits) -> Iterator[str]:
    for at, mount in enumerate(edits.mounts):
        yield from _path_faults(f"{place}.mounts[{at}].hostPath", mount.host_path)
        yield from _path_faults(f"{place}.mounts[{at}].containerPath", mount.container_path)
        unknown = [option for option in mount.options if option not in _OPTIONS]
        if unknown:
            yield f"{place}.mounts[{at}].options: {', '.join(map(repr, unknown))} is not an option that this plugin uses"
        if "ro" not in mount.options:
            yield f"{place}.mounts[{at}].options: {mount.host_path!r} must be read-only"
    for at, node in enumerate(edits.device_nodes):
        yield from _path_faults(f"{place}.deviceNodes[{at}].path", node.path)
        if node.host_path:
            yield from _path_faults(f"{place}.deviceNodes[{at}].hostPath", node.host_path)
    for at, hook in enumerate(edits.hooks):
        yield from _path_faults(f"{place}.hooks[{at}].path", hook.path)
    yield from _twice(f"{place}.mounts", _mounted(edits))
    yield from _twice(f"{place}.deviceNodes", _nodes(edits))


def _mounted(edits: Edits) -> list[str]:
    return [mount.container_path for mount in edits.mounts]


def _nodes(edits: Edits) -> list[str]:
    return [node.path for node in edits.device_nodes]


def _path_faults(place: str, path: str) -> Iterator[str]:
    if not path.startswith("/") or normpath(path) != path or path.startswith("//"):
        yield f"{place}: {path!r} is not an absolute path without '.', '..' and needless slashes"
    elif path == "/":
        yield f"{place}: '/' is the whole file system"
    elif not path.isprintable():
        yield f"{place}: {path!r} is not printable text"
    elif len(path.encode()) > LONGEST_PATH:
        yield f"{place}: {path[:40]!r}... is longer than the longest path on Linux"


def _twice(place: str, paths: Iterable[str]) -> Iterator[str]:
    for path, count in Counter(paths).items():
        if count > 1:
            yield f"{place}: {path!r} occurs {count} times"
