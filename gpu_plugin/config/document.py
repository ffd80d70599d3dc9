"""Parse a config file's text into plain values, and find the line and column of each value. JSON is parsed as YAML."""

import re
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from gpu_plugin.config.errors import ConfigError, Fault
from gpu_plugin.config.words import shortened

Place = tuple[str | int, ...]  # the path to a value: keys, and indices of list items

MAX_BYTES = 1024 * 1024  # the largest content of a ConfigMap (Kubernetes, MaxSecretSize and etcd's limit for an object)
MAX_VALUES = 20_000  # keys and values of a file: more are an attack or an accident
MAX_DEPTH = 50
_MAX_INTEGER = 2**63
_LONGEST_KEY = 83  # of a key in a message, with the dots

_YAML = "tag:yaml.org,2002:"
# Numbers of YAML 1.2 that are text in YAML 1.1, which PyYAML reads
_GO_NUMBER = re.compile(r"[-+]?(0[oO][0-7_]{1,20}|[0-9]{1,9}[eE]\+?[0-9])")
_KINDS = {"int": "a valid whole number", "float": "a valid number", "bool": "true or false"}


class Limits(msgspec.Struct, frozen=True):
    """The limits of a document in bytes and values; `why` is the reason of the limit in bytes, for the error.

    Values that aliases repeat count each time.
    """

    most_bytes: int = MAX_BYTES
    most_values: int = MAX_VALUES
    why: str = "the most that a ConfigMap holds"


CONFIG_FILE = Limits()


class Document(msgspec.Struct, frozen=True):
    """A parsed config file. `source` is the file's name.

    `positions` has the line and the column, counted from 1, of each key and item, and `folded` the same by places in lower case.
    Without a text, they are empty.
    """

    content: Mapping[str, object]
    source: str = "config file"
    positions: Mapping[Place, tuple[int, int]] = {}
    folded: Mapping[Place, tuple[int, int]] = {}

    @classmethod
    def of(cls, content: object, source: str = "config file") -> "Document":
        """Return a document of parsed content. Raises ConfigError if the content is not a mapping."""
        return cls(_mapping(content, source), source)

    def fault(self, place: Place, reason: str) -> Fault:
        """Return a fault of the value at this place."""
        line, column = self._position(place)
        return Fault(reason, self.source, line, spell(place), column)

    def line(self, place: Place) -> int:
        """Return the line of a place, or of the closest existing place around it; 0 if no line is known."""
        return self._position(place)[0]

    def _position(self, place: Place) -> tuple[int, int]:
        """Return the position of a place, whatever the case of its keys, or else of a place around it; zeros if unknown."""
        for end in range(len(place), 0, -1):
            around = place[:end]
            if position := self.positions.get(around) or self.folded.get(_folded(around)):
                return position
        return 0, 0


def _mapping(content: object, source: str) -> Mapping[str, object]:
    """Return the content of a file, which may be None. Raises ConfigError if it is not a mapping."""
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        noun = "a list" if isinstance(content, list) else "text" if isinstance(content, str) else repr(content)
        raise ConfigError.of([Fault(f"holds {noun}, not a mapping", source)])
    return content


def is_manifest(keys: Collection[object]) -> bool:
    """Whether a mapping with these keys is a Kubernetes manifest."""
    return "apiVersion" in keys and "kind" in keys


def at(content: object, place: Place) -> object:
    """Return the value at a place in nested mappings; None without a value."""
    for key in place:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def spell(place: Place) -> str:
    """Return a place as text: sharing.timeSlicing.resources[1].replicas."""
    spelt = ""
    for step in place:
        if isinstance(step, int):
            spelt += f"[{step}]"
        else:
            short = shortened(step, _LONGEST_KEY)
            shown = short if short.isprintable() and short else repr(short)
            spelt += f".{shown}" if spelt else shown
    return spelt


def parse(
    written: bytes, source: str, limits: Limits = CONFIG_FILE, typed_keys: frozenset[str] | None = None
) -> Document:
    """Parse a file's bytes, which must be one YAML or JSON mapping in UTF-8.

    With `typed_keys`, read as Go's YAML library does: only the first document, and 0o17 and 1e2 are numbers. Only the values
    of these keys become numbers, true and false. Other values stay text.

    Raises:
        ConfigError: the file is too long, is not YAML, or has values that no configuration has; with the lines.
    """
    import yaml  # noqa: PLC0415 - 9 ms and 1 MiB, only with a file

    if len(written) > limits.most_bytes:
        raise ConfigError.of([Fault(f"more than {limits.most_bytes} bytes, {limits.why}", source)])
    try:
        text = written.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.of(
            [_at_offset(written.decode("utf-8", "replace"), error.start, "not UTF-8 text", source)]
        ) from None
    try:
        root = _composed(text, limits, single=typed_keys is None)
    except yaml.reader.ReaderError as error:
        reason = f"the character #x{error.character:04x} is not allowed in YAML"
        raise ConfigError.of([_at_offset(text, error.position, reason, source)]) from None
    except yaml.MarkedYAMLError as error:
        line, column = _position(error.problem_mark) if error.problem_mark else (0, 0)
        faults = _unrendered(text, source) or [Fault(_reason(error), source, line, column=column)]
        raise ConfigError.of(faults) from None
    if root is None:
        return Document({}, source)
    values = _Values(root, source, limits.most_values, typed_keys)
    content = values.of(root, ())
    if values.faults:
        raise ConfigError.of(_unrendered(text, source) or sorted(values.faults, key=attrgetter("line")))
    folded = {_folded(place): position for place, position in values.positions.items()}
    return Document(_mapping(content, source), source, values.positions, folded)


def _at_offset(text: str, offset: int, reason: str, source: str) -> Fault:
    """Return a fault of the character at this offset."""
    before = text[:offset]
    return Fault(reason, source, before.count("\n") + 1, column=len(before) - before.rfind("\n"))


def _unrendered(text: str, source: str) -> list[Fault]:
    """Return the fault of a text with template actions, {{ ... }}, which make it invalid YAML."""
    reason = template_reason(text)
    return [_at_offset(text, text.find("{{"), reason, source)] if reason else []


def template_reason(text: str) -> str:
    """Return the reason if a text is a template without rendering; empty if it has no template action."""
    start = text.find("{{")
    end = text.find("}}", start)
    if start < 0 or end < 0:
        return ""
    action = shortened(text[start : end + 2], _LONGEST_KEY)
    return f"{action!r} is a template action: give the file that Helm, or another tool, renders from it"


def _composed(text: str, limits: Limits, *, single: bool) -> Any:
    """Return the root node of the text; None if the text is empty. `single`: refuse text with more than one document.

    libyaml is ten times as fast. If it refuses the text, PyYAML's own parser decides, because its errors are clearer.

    Raises:
        yaml.YAMLError: PyYAML's parser refuses the text.
    """
    import yaml  # noqa: PLC0415

    if yaml.__with_libyaml__:
        try:
            return _first_document(text, yaml.CSafeLoader, limits, single=single)
        except yaml.YAMLError:
            pass
    return _first_document(text, yaml.SafeLoader, limits, single=single)


def _first_document(text: str, loader: Any, limits: Limits, *, single: bool) -> Any:
    """Return the root node of the first document.

    If `single`, only an empty document may follow: an end marker or a separator.
    """
    import yaml  # noqa: PLC0415

    events: Iterator[Any] = yaml.parse(text, Loader=loader)
    _check_size(events, limits)
    composer = loader(text)
    try:
        root = composer.get_node() if composer.check_node() else None
    finally:
        composer.dispose()
    if not single:
        return root
    if root is not None and root.id == "mapping" and is_manifest([key.value for key, _ in root.value]):
        return root  # do not check the documents after a manifest
    start: Any = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            start = event.start_mark
        elif isinstance(event, yaml.NodeEvent) and (
            event.__class__ is not yaml.ScalarEvent or event.value or event.style
        ):
            raise yaml.MarkedYAMLError(problem="but found another document", problem_mark=start)
    return root


def _check_size(events: Iterator[Any], limits: Limits) -> None:
    """Read the events of a document. Raises MarkedYAMLError if it has too many levels or values: composing is recursive."""
    import yaml  # noqa: PLC0415

    values = depth = 0
    for event in events:
        if isinstance(event, yaml.DocumentEndEvent):
            return
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            values += 1
            start: Any = event.start_mark
            if values > limits.most_values:
                raise yaml.MarkedYAMLError(problem=f"more than {limits.most_values} values", problem_mark=start)
            if depth == MAX_DEPTH:
                raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=start)
            depth += isinstance(event, yaml.CollectionStartEvent)


def _position(mark: Any) -> tuple[int, int]:
    """Return the line and the column of a mark, counted from 1."""
    return mark.line + 1, mark.column + 1


def _folded(place: Place) -> Place:
    """Return a place with its keys in lower case."""
    return tuple(step.lower() if isinstance(step, str) else step for step in place)


class _Values:
    """Converts composed nodes to plain values, and collects their positions and faults."""

    def __init__(self, root: Any, source: str, most: int, typed_keys: frozenset[str] | None) -> None:
        from yaml.constructor import SafeConstructor  # noqa: PLC0415

        self.faults: list[Fault] = []
        self.positions: dict[Place, tuple[int, int]] = {}
        self._constructor = SafeConstructor()
        self._root = root
        self._source = source
        self._most = self._left = most
        self._typed_keys = typed_keys
        self._open: list[Any] = []  # the nodes around the present node

    def of(self, node: Any, place: Place) -> object:
        """Return the plain value of a node. Raises ConfigError if aliases produce too many values."""
        self._left -= 1
        if self._left < 0:
            line, column = _position(self._root.start_mark)
            reason = f"aliases make more than {self._most} values of it"
            raise ConfigError.of([Fault(reason, self._source, line, column=column)])
        if any(node is around for around in self._open):
            return self._fault(node, place, "an alias that contains itself")
        if node.id == "scalar":
            return self._scalar(node, place)
        if node.tag not in {f"{_YAML}map", f"{_YAML}seq"}:
            return self._fault(node, place, f"the tag {_tag(node)} has no meaning here")
        if node.id == "mapping":
            return self._mapping(node, place)
        self._open.append(node)
        items = []
        for index, item in enumerate(node.value):
            self.positions[(*place, index)] = _position(item.start_mark)
            items.append(self.of(item, (*place, index)))
        self._open.pop()
        return items

    def _mapping(self, node: Any, place: Place) -> dict[str, object]:
        own: dict[str, tuple[Any, Any]] = {}
        merged: list[tuple[Any, Any]] = []
        first_lines: dict[str, int] = {}
        for key, inner in node.value:
            name = key.value
            if key.id != "scalar":
                self._fault(key, place, "a key here is not text")
            elif name in first_lines:
                self._fault(key, (*place, name), f"appears twice, first on line {first_lines[name]}")
            elif key.tag == f"{_YAML}merge":
                merged += [(key, other) for other in (inner.value if inner.id == "sequence" else [inner])]
            elif not _whole(name):
                self._fault(key, (*place, name), "an unpaired surrogate is not a character")
            else:
                own[name] = key, inner
            if key.id == "scalar":
                first_lines.setdefault(name, key.start_mark.line + 1)
        found: dict[str, object] = {}
        self._open.append(node)
        # The keys of this mapping have priority, then the merged mappings in order (yaml.org/type/merge).
        for key, other in reversed(merged):
            if other.id != "mapping" or any(other is around for around in self._open):
                self._fault(key, place, "'<<' merges other mappings, and nothing else")
            else:
                found |= self._mapping(other, place)
        for name, (key, inner) in own.items():
            self.positions[(*place, name)] = _position(key.start_mark)
            found[name] = self.of(inner, (*place, name))
        self._open.pop()
        return found

    def _scalar(self, node: Any, place: Place) -> object:
        kind = node.tag.removeprefix(_YAML)
        if not _whole(node.value):
            return self._fault(node, place, "an unpaired surrogate is not a character")
        typed = self._typed_keys is not None and not self._typed_keys.isdisjoint(place)
        if typed and not node.style and _GO_NUMBER.fullmatch(node.value):
            digits = node.value.replace("_", "").lower()
            return int(digits, 8) if "o" in digits else int(float(digits))
        # 1:30 is 90 to YAML 1.1 and text to NVIDIA's parser (and a MIG index); a date is text to it too.
        if kind in {"str", "timestamp", "value"} or (kind in {"int", "float"} and ":" in node.value):
            return str(node.value)
        if kind == "null":
            return None
        if self._typed_keys is not None and not typed and kind in _KINDS:
            return str(node.value)
        try:
            if kind == "bool":
                return bool(self._constructor.bool_values[node.value.lower()])
            if kind == "int":
                whole = int(self._constructor.construct_yaml_int(node))
                if abs(whole) >= _MAX_INTEGER:
                    raise ValueError
                return whole
            if kind == "float":
                number = float(self._constructor.construct_yaml_float(node))
                return int(number) if number.is_integer() and abs(number) < _MAX_INTEGER else number
        except (ValueError, KeyError, IndexError):
            return self._fault(node, place, f"{node.value[:40]!r} is not {_KINDS[kind]}")
        return self._fault(node, place, f"the tag {_tag(node)} has no meaning here")

    def _fault(self, node: Any, place: Place, reason: str) -> object:
        """Add a fault, and return None as the value."""
        line, column = _position(node.start_mark)
        self.faults.append(Fault(reason, self._source, line, spell(place), column))
        return None


def _tag(node: Any) -> str:
    return str(node.tag).replace(_YAML, "!!")[:80]


def _whole(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _reason(error: Any) -> str:
    """Return a parser's error as one sentence."""
    problem = " ".join(str(error.problem or "").split())
    if "'\\t'" in problem:
        return "a tab where YAML requires spaces"
    if problem == "but found another document":
        return "a second document begins here; one is read"
    context = " ".join(str(error.context or "").split())
    if problem == "second occurrence":
        return context.partition(";")[0]
    return f"{context}: {problem}" if context else problem
