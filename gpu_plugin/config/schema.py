"""Sections of a config file as structs, and the strict reader that makes them of a document.

The fields of a section's struct are its keys. A field without a default is required. The type of a field is annotated with the
kind of the value and the help text: `Annotated[T, kind, "help"]`. A kind is a `Reading` for a value, `Rows`, `Table`, or the
struct of a section, which may be left out if it is `T`. None stands for a row without a valid value for a required key, so that
the other rows keep their index. The options with a key in the file (`settings.OPTIONS`) are keys of their section, too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from operator import eq
from typing import Any, TypeVar, get_args

import msgspec

from gpu_plugin.config.document import Document, Place, at, spell, template_reason
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.settings import OPTIONS
from gpu_plugin.config.values import ItemError, Reading, boolean, boolean_or_auto
from gpu_plugin.config.words import shortened

S = TypeVar("S", bound=msgspec.Struct)

# Truth values of YAML 1.1 that NVIDIA's parser accepts in a file, and that PyYAML reads as text.
_ONE_LETTER: Mapping[object, bool] = {"y": True, "Y": True, "n": False, "N": False}

MAX_HINTS = 20  # of a file, at the right keys: the search for a hint takes longer than all other checks


class Rows(msgspec.Struct, frozen=True):
    """The kind of a key whose value is a list of sections of the file."""

    section: type[msgspec.Struct]


class Table(msgspec.Struct, frozen=True):
    """The kind of a key whose value is a mapping with free keys. `names` must accept only one spelling of a key."""

    names: Reading[Any]
    values: Reading[Any]


class Key(msgspec.Struct, frozen=True):
    """A key of a section. `field` is the field of the section's struct, or the name of the option.

    `default` is the default as a file has it; None or empty without one.
    """

    field: str
    kind: Reading[Any] | Rows | Table | type[msgspec.Struct]
    help: str
    default: object
    required: bool = False
    option: bool = False


@cache
def keys_of(section: type[msgspec.Struct], path: str) -> Mapping[str, Key]:
    """Return the keys of the section at a dotted path."""
    found = {}
    for option in OPTIONS:
        above, _, name = option.file.rpartition(".")
        if path and above == path:
            found[name] = Key(option.name, option.parse, option.help, option.default, option=True)
    for field in msgspec.structs.fields(section):
        *_, kind, text = get_args(field.type)
        default = field.default if isinstance(field.default, bool | str) else None
        found[field.encode_name] = Key(field.name, kind, text, default, field.required)
    return found


def dotted(place: Place) -> str:
    """Return the keys of a place, without indices, as a dotted path."""
    return ".".join(step for step in place if isinstance(step, str))


def _paths(section: type[msgspec.Struct], above: Place = ()) -> Iterator[Place]:
    """Return the place of every key outside of lists."""
    for name, key in keys_of(section, dotted(above)).items():
        yield (*above, name)
        if isinstance(key.kind, type):
            yield from _paths(key.kind, (*above, name))


class Reader:
    """Reads a document as a struct."""

    def __init__(self, document: Document, schema: type[msgspec.Struct]) -> None:
        self.document = document
        self.options: dict[str, object] = {}  # valid values by name
        self.invalid: set[str] = set()  # names of options with an invalid value
        self.faults: list[Fault] = []  # with paths in the case of the schema
        self._schema = schema
        self._hints = MAX_HINTS

    def fault(self, place: Place, reason: str) -> None:
        """Add a fault of the value at this place."""
        self.faults.append(self.document.fault(place, reason))

    def section(self, section: type[S], place: Place, written: object) -> S | None:
        """Return the section at a place; None if it is not a mapping, or has no valid value for a required key."""
        if not isinstance(written, Mapping):
            self._wrong_kind(place, "a mapping", written)
            return None
        known = keys_of(section, dotted(place))
        given = set()
        found: dict[str, Any] = {}
        for name, value in self._given(known, place, written):
            given.add(name)
            key = known[name]
            read = self._value(key, (*place, name), value)
            if read is not None:
                (self.options if key.option else found)[key.field] = read
            elif key.option:
                self.invalid.add(key.field)
        required = [(name, key.field) for name, key in known.items() if key.required]
        for name, _ in required:
            if name not in given:
                self.fault(place, f"no {name} specified")
        return section(**found) if all(field in found for _, field in required) else None

    def _given(
        self, known: Mapping[str, Key], place: Place, written: Mapping[object, object]
    ) -> Iterator[tuple[str, object]]:
        """Return the known keys and their values. NVIDIA's parser (Go's encoding/json) ignores the case of keys."""
        folded = {name.lower(): name for name in known}
        spellings = Counter(str(name).lower() for name in written)
        for each, value in written.items():
            name = str(each)
            if name not in known and spellings[name.lower()] == 1:
                name = folded.get(name.lower(), name)
            if name not in known:
                self.fault((*place, name), template_reason(name) or self._unknown(place, known, name))
            elif value is not None:
                yield name, value

    def _value(self, key: Key, place: Place, value: object) -> object:
        """Return the value of a key; None if it is invalid."""
        if isinstance(key.kind, Reading):
            return self._parsed(key.kind, place, value)
        if isinstance(key.kind, Table):
            return self._table(key.kind, place, value)
        if not isinstance(key.kind, Rows):
            return self.section(key.kind, place, value)
        if not isinstance(value, list | tuple):
            self._wrong_kind(place, "a list", value)
            return None
        if not value and key.required:
            self.fault(place, f"no {place[-1]} specified")
        return tuple(self.section(key.kind.section, (*place, index), row) for index, row in enumerate(value))

    def _table(self, table: Table, place: Place, value: object) -> object:
        if not isinstance(value, Mapping):
            self._wrong_kind(place, "a mapping", value)
            return None
        found = {}
        for name, inner in value.items():
            here = (*place, str(name))
            try:
                known = table.names(name)
            except ValueError as error:
                self.fault(here, template_reason(str(name)) or str(error))
                continue
            if inner is not None and (parsed := self._parsed(table.values, here, inner)) is not None:
                found[known] = parsed
        return found

    def _parsed(self, reading: Reading[Any], place: Place, value: object) -> object:
        if self._has_templates(place, value):
            return None
        if reading in (boolean, boolean_or_auto) and isinstance(value, str):
            value = _ONE_LETTER.get(value, value)
        try:
            return reading(value)
        except ValueError as error:
            item = (error.index,) if isinstance(error, ItemError) else ()
            self.fault((*place, *item), shortened(str(error), 400))
            return None

    def _wrong_kind(self, place: Place, needed: str, value: object) -> None:
        """Add a fault of a value of the wrong kind. Template actions in the value are the cause, if there are any."""
        if not self._has_templates(place, value):
            self.fault(place, f"{needed} is needed here, not {shortened(repr(value), 80)}")

    def _has_templates(self, place: Place, value: object) -> bool:
        """Add a fault for each text with a template action."""
        templates = [*_templates(place, value)]
        for where, reason in templates:
            self.fault(where, reason)
        return bool(templates)

    def _unknown(self, place: Place, known: Mapping[str, Key], name: str) -> str:
        if "." in name:
            return "unknown key; nest mappings instead of writing dots"
        self._hints -= 1
        near = self._meant(place, known, name) if self._hints >= 0 else ""
        return f"unknown key; did you mean {near}?" if near else "unknown key"

    def _meant(self, place: Place, known: Mapping[str, Key], name: str) -> str:
        """Return the path of the most similar key, in the same mapping or another mapping; empty if no key is similar."""
        import difflib  # noqa: PLC0415 - only for unknown keys

        def rank(other: Place) -> tuple[int, bool]:
            """Prefer places with many mappings in common, then places in a mapping of the file."""
            return len([*takewhile(bool, map(eq, place, other))]), at(self.document.content, other[:-1]) is not None

        here = {_folded(key): spell((*place, key)) for key in known}
        best: dict[str, Place] = {}
        for other in _paths(self._schema):
            folded = _folded(str(other[-1]))
            if folded not in best or rank(other) > rank(best[folded]):
                best[folded] = other
        elsewhere = {folded: spell(other) for folded, other in best.items()}
        for names, cutoff in ((here, 1.0), (elsewhere, 1.0), (here, 0.6), (elsewhere, 0.8)):
            near = difflib.get_close_matches(_folded(name[:80]), names, 1, cutoff)
            if near:
                return names[near[0]]
        return ""


def _templates(place: Place, value: object) -> Iterator[tuple[Place, str]]:
    """Return the place and the fault of each text with a template action. In quotes, such a text is valid YAML."""
    if isinstance(value, str) and (reason := template_reason(value)):
        yield place, reason
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _templates((*place, index), item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _templates((*place, str(key)), item)


def _folded(key: str) -> str:
    """Return a key in one form for all its spellings: migStrategy, mig-strategy and MIG_STRATEGY."""
    return key.replace("-", "").replace("_", "").lower()
