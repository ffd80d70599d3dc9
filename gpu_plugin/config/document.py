"""Parse a config file's text into plain values and the line number of each value. JSON is parsed as YAML."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

from gpu_plugin.config.errors import ConfigError, Fault
from gpu_plugin.config.words import shortened

Place = tuple[str | int, ...]
"""The path to a value: keys, and indices of list items."""

MAX_BYTES = 1024 * 1024
"""The largest content of a ConfigMap (Kubernetes, MaxSecretSize and etcd's limit for an object)."""

MAX_VALUES = 20_000
"""Keys and values of a file. Values that aliases repeat count each time. A larger file is an attack or an accident."""

MAX_DEPTH = 50


class Limits(msgspec.Struct, frozen=True):
    """The limits of a document in bytes and values; `why` is the reason of the limit in bytes, for the error."""

    most_bytes: int = MAX_BYTES
    most_values: int = MAX_VALUES
    why: str = "the most that a ConfigMap holds"


CONFIG_FILE = Limits()
_MAX_INTEGER = 2**63
_LONGEST_KEY = 83  # of a key in a message, with the dots

_YAML = "tag:yaml.org,2002:"
_NOUNS: Mapping[type, str] = {list: "a list", str: "text"}
_KINDS = {"int": "a valid whole number", "float": "a valid number", "bool": "true or false"}


class Document(msgspec.Struct, frozen=True):
    """A parsed config file. `lines` has the line of every key and list item, counted from 1; `source` is the file's name."""

    content: Mapping[str, object]
    source: str = "config file"
    lines: Mapping[Place, int] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, content: object, source: str = "config file", lines: Mapping[Place, int] | None = None) -> "Document":
        """Return a document of parsed content. Raises ConfigError if the content is not a mapping."""
        if content is None:
            content = {}
        if not isinstance(content, Mapping):
            raise ConfigError.of([Fault(f"holds {_NOUNS.get(type(content), repr(content))}, not a mapping", source)])
        return cls(content, source, lines or {})

    def fault(self, place: Place, reason: str) -> Fault:
        """Return a fault of the value at this place."""
        return Fault(reason, self.source, self.line(place), spell(place))

    def line(self, place: Place) -> int:
        """Return the line of a place, or of the closest existing place around it; 0 if no line is known."""
        return next((self.lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in self.lines), 0)


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

    With `typed_keys`, only the values of these keys become numbers, true and false. Other values stay text.

    Raises:
        ConfigError: the file is too long, is not YAML, or has values that no configuration has; with the lines.
    """
    import yaml  # noqa: PLC0415 - 9 ms and 1 MiB, only with a file

    if len(written) > limits.most_bytes:
        raise ConfigError.of([Fault(f"more than {limits.most_bytes} bytes, {limits.why}", source)])
    try:
        text = written.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = written.count(b"\n", 0, error.start) + 1
        raise ConfigError.of([Fault("not UTF-8 text", source, line)]) from None
    text = _without_tabs(text)
    try:
        loader, root = _composed(text, limits)
    except yaml.reader.ReaderError as error:
        reason = f"the character #x{error.character:04x} is not allowed in YAML"
        raise ConfigError.of([Fault(reason, source, text.count("\n", 0, error.position) + 1)]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError.of(_unrendered(text, source) or [Fault(_reason(error), source, line)]) from None
    if root is None:
        return Document.of(None, source)
    reader = _Values(loader, root, source, limits.most_values, typed_keys)
    content = reader.value(root, ())
    if reader.faults:
        raise ConfigError.of(_unrendered(text, source) or reader.faults)
    return Document.of(content, source, reader.lines)


def _unrendered(text: str, source: str) -> list[Fault]:
    """Return the fault of a text with template actions, {{ ... }}, which make it invalid YAML."""
    reason = _template_reason(text)
    return [Fault(reason, source, text.count("\n", 0, text.find("{{")) + 1)] if reason else []


def _template_reason(text: str) -> str:
    """Return the reason if a text is a template without rendering; empty if it has no template action."""
    start = text.find("{{")
    end = text.find("}}", start)
    if start < 0 or end < 0:
        return ""
    action = shortened(text[start : end + 2], _LONGEST_KEY)
    return f"{action!r} is a template action: give the file that Helm, or another tool, renders from it"


def unrendered(document: Document) -> list[Fault]:
    """Return a fault for each key and text of a document with a template action. In quotes, such a text is valid YAML."""

    def search(value: object, place: Place) -> Iterator[Fault]:
        if isinstance(value, str) and (reason := _template_reason(value)):
            yield document.fault(place, reason)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from search(item, (*place, index))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if reason := _template_reason(str(key)):
                    yield document.fault((*place, key), reason)
                else:
                    yield from search(item, (*place, key))

    return [*search(document.content, ())]


def _composed(text: str, limits: Limits) -> tuple[Any, Any]:
    """Return a loader and the root node of the text; the node is None if the text is empty.

    libyaml is ten times as fast. If it refuses the text, PyYAML's own parser decides, because its errors are clearer.

    Raises:
        yaml.YAMLError: PyYAML's parser refuses the text.
    """
    import yaml  # noqa: PLC0415

    if yaml.__with_libyaml__:
        with suppress(yaml.YAMLError):
            return _compose(_native_loader()(text), limits)
    return _compose(_loader()(text), limits)


def _compose(loader: Any, limits: Limits) -> tuple[Any, Any]:
    """Return the loader and the node of the first document. Only an empty document may follow: an end marker or a separator."""
    import yaml  # noqa: PLC0415

    loader.most = loader.left = limits.most_values
    loader.get_event()
    root = None
    while not loader.check_event(yaml.StreamEndEvent):
        mark = loader.peek_event().start_mark
        node = loader.compose_document()
        if root is None:
            root = node
            if node.id == "mapping" and is_manifest([key.value for key, _ in node.value]):
                break  # do not check the documents after a manifest
        elif node.id != "scalar" or node.value or node.style:
            raise yaml.MarkedYAMLError(problem="but found another document", problem_mark=mark)
    return loader, root


class _Bounded:
    """Stops a loader at documents with too many levels or values. A mix-in before PyYAML's composer."""

    left = most = MAX_VALUES
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        import yaml  # noqa: PLC0415

        self.left -= 1
        self.depth += 1
        if self.left < 0 or self.depth > MAX_DEPTH:
            problem = f"more than {self.most} values" if self.left < 0 else f"nested more than {MAX_DEPTH} deep"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)  # type: ignore[attr-defined]
        node = super().compose_node(parent, index)  # type: ignore[misc]
        self.depth -= 1
        return node


@cache
def _loader() -> Any:
    import yaml  # noqa: PLC0415

    return type("Loader", (_Bounded, yaml.SafeLoader), {"__doc__": "The safe loader of PyYAML, bounded."})


@cache
def _native_loader() -> Any:
    from yaml.composer import Composer  # noqa: PLC0415
    from yaml.constructor import SafeConstructor  # noqa: PLC0415
    from yaml.cyaml import CParser  # type: ignore[attr-defined]  # noqa: PLC0415
    from yaml.resolver import Resolver  # noqa: PLC0415

    class Loader(_Bounded, Composer, CParser, SafeConstructor, Resolver):
        """Composes libyaml's events with PyYAML: libyaml's own composer has no limits."""

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            for part in (Composer, SafeConstructor, Resolver):
                part.__init__(self)

    return Loader


class _Values:
    """Converts composed nodes to plain values, and collects their lines and faults."""

    def __init__(
        self, loader: Any, root: Any, source: str, most: int, typed_keys: frozenset[str] | None = None
    ) -> None:
        self.faults: list[Fault] = []
        self.lines: dict[Place, int] = {}
        self._loader = loader
        self._root = root
        self._source = source
        self._most = self._left = most
        self._typed_keys = typed_keys
        self._open: list[Any] = []  # the nodes around the present node

    def value(self, node: Any, place: Place) -> object:
        """Return the plain value of a node. Raises ConfigError if aliases produce too many values."""
        self._left -= 1
        if self._left < 0:
            reason = f"aliases make more than {self._most} values of it"
            raise ConfigError.of([Fault(reason, self._source, _line(self._root))])
        self.lines.setdefault(place, _line(node))
        if any(node is around for around in self._open):
            return self._fault(node, place, "an alias that contains itself")
        if node.id == "scalar":
            return self._scalar(node, place)
        if node.tag not in {f"{_YAML}map", f"{_YAML}seq"}:
            return self._fault(node, place, f"the tag {_tag(node)} has no meaning here")
        self._open.append(node)
        try:
            if node.id == "mapping":
                return self._mapping(node, place)
            return [self.value(item, (*place, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.pop()

    def _mapping(self, node: Any, place: Place) -> dict[str, object]:
        found: dict[str, object] = {}
        merged: list[tuple[Any, Any]] = []
        first_lines: dict[str, int] = {}
        for key, inner in node.value:
            if key.id != "scalar":
                self._fault(key, place, "a key here is not text")
                continue
            name = str(key.value)
            if name in first_lines:
                self._fault(key, (*place, name), f"appears twice, first on line {first_lines[name]}")
                continue
            first_lines[name] = _line(key)
            if key.tag == f"{_YAML}merge":
                merged.append((key, inner))
                continue
            if not _whole(name):
                self._fault(key, (*place, name), "an unpaired surrogate is not a character")
                continue
            self.lines[(*place, name)] = _line(key)
            found[name] = self.value(inner, (*place, name))
        for key, inner in merged:
            # The keys of this mapping have priority, then the merged mappings in order (yaml.org/type/merge).
            for other in inner.value if inner.id == "sequence" else [inner]:
                if other.id != "mapping" or any(other is around for around in self._open):
                    self._fault(key, place, "'<<' merges other mappings, and nothing else")
                    continue
                found |= self._merged(other, place, found)
        return found

    def _merged(self, node: Any, place: Place, found: Mapping[str, object]) -> dict[str, object]:
        """Return the keys of a merged mapping that are not in `found`."""
        lines, self.lines = self.lines, {}
        self._open.append(node)
        try:
            new = {name: value for name, value in self._mapping(node, place).items() if name not in found}
        finally:
            self._open.pop()
            added, self.lines = self.lines, lines
        depth = len(place)
        self.lines |= {where: line for where, line in added.items() if len(where) > depth and where[depth] in new}
        return new

    def _scalar(self, node: Any, place: Place) -> object:
        kind = node.tag.removeprefix(_YAML)
        if not _whole(node.value):
            return self._fault(node, place, "an unpaired surrogate is not a character")
        # 1:30 is 90 to YAML 1.1 and text to NVIDIA's parser (and a MIG index); a date is text to it too.
        if kind in {"str", "timestamp", "value"} or (kind in {"int", "float"} and ":" in node.value):
            return str(node.value)
        if kind == "null":
            return None
        if self._typed_keys is not None and self._typed_keys.isdisjoint(place) and kind in _KINDS:
            return str(node.value)
        try:
            if kind == "bool":
                return bool(self._loader.bool_values[node.value.lower()])
            if kind == "int":
                number = self._loader.construct_yaml_int(node)
                if abs(number) >= _MAX_INTEGER:
                    raise ValueError
                return int(number)
            if kind == "float":
                number = float(self._loader.construct_yaml_float(node))
                return int(number) if number.is_integer() and abs(number) < _MAX_INTEGER else number
        except (ValueError, KeyError, IndexError):
            return self._fault(node, place, f"{node.value[:40]!r} is not {_KINDS[kind]}")
        return self._fault(node, place, f"the tag {_tag(node)} has no meaning here")

    def _fault(self, node: Any, place: Place, reason: str) -> object:
        """Add a fault, and return None as the value."""
        self.faults.append(Fault(reason, self._source, _line(node), spell(place)))
        return None


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _tag(node: Any) -> str:
    return str(node.tag).replace(_YAML, "!!")[:80]


def _whole(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _without_tabs(text: str) -> str:
    """Replace tabs in JSON, which YAML does not allow as indentation. A JSON string has no tab."""
    if "\t" in text and text.lstrip().startswith("{"):
        import json  # noqa: PLC0415 - only for JSON with tabs

        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return text
        return text.replace("\t", " ")
    return text


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
