"""What a file says that takes effect here and not with NVIDIA's plugin v0.20.0, for those who bring theirs along.

Its config loader validates `resources`, and `rename` and `devices` of shared resources, and discards them with a warning
(api/config/v1/config.go, DisableResourceNamingInConfig; replicas.go); it puts nvidia.com/ before every resource name, so one with
another domain is refused by whatever reads the file with that loader: GPU feature discovery and the MPS control daemon too.
"""

from collections.abc import Iterator, Mapping, Sequence

from gpu_plugin.config.document import Document, Place, spell
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.names import DOMAIN

_MAX_SHOWN = 3


def told_to_switchers(document: Document) -> list[Fault]:
    """A sentence for all keys that NVIDIA's plugin ignores, and one for all names that its programs refuse; or neither."""
    ignored = [place for place, _ in _ignored(document.content)]
    foreign = [(place, name) for place, name in _names(document.content) if _domain(name) not in {"", DOMAIN}]
    told = []
    if ignored:
        reason = f"{_some([spell(place) for place in ignored])}: applied here, ignored by NVIDIA's plugin v0.20.0"
        told.append(Fault(reason, document.source, document.line(ignored[0])))
    if foreign:
        names = list(dict.fromkeys(name for _, name in foreign))
        reason = (
            f"{_some(names)}: a name of another domain than {DOMAIN}, for which NVIDIA's GPU feature discovery and MPS control "
            "daemon refuse the file; where they run too, give them a file without it"
        )
        told.append(Fault(reason, document.source, document.line(foreign[0][0])))
    return told


def _ignored(content: Mapping[str, object]) -> Iterator[tuple[Place, object]]:
    for key in ("gpus", "mig"):
        rows = _at(content, "resources", key)
        if isinstance(rows, Sequence) and rows:
            yield ("resources", key), rows
    for place, row in _shared(content):
        for key in ("rename", "devices"):
            value = row.get(key)
            if value is not None and value != "all":
                yield (*place, key), value


def _names(content: Mapping[str, object]) -> Iterator[tuple[Place, str]]:
    for key in ("gpus", "mig"):
        for place, row in _rows(content, "resources", key):
            yield (*place, "name"), str(row.get("name") or "")
    for place, row in _shared(content):
        for key in ("name", "rename"):
            yield (*place, key), str(row.get(key) or "")


def _shared(content: Mapping[str, object]) -> Iterator[tuple[Place, Mapping[str, object]]]:
    for strategy in ("timeSlicing", "mps"):
        yield from _rows(content, "sharing", strategy, "resources")


def _rows(content: Mapping[str, object], *place: str) -> Iterator[tuple[Place, Mapping[str, object]]]:
    rows = _at(content, *place)
    if isinstance(rows, list | tuple):
        for index, row in enumerate(rows):
            if isinstance(row, Mapping):
                yield (*place, index), row


def _at(content: object, *place: str) -> object:
    for key in place:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _domain(name: str) -> str:
    domain, slash, _ = name.partition("/")
    return domain if slash else ""


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    return f"{', '.join(items[:_MAX_SHOWN])}{more}"
