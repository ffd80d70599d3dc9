"""The tree of a config file's keys and values, and the strict check of a document by this tree."""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from operator import eq, itemgetter

import msgspec

from gpu_plugin.config.document import Document, Place, at, spell
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.values import ItemError, Reading, boolean, boolean_or_auto
from gpu_plugin.config.words import shortened

_ONE_LETTER: Mapping[str, object] = {"y": True, "Y": True, "n": False, "N": False}
"""Truth values of YAML 1.1 that NVIDIA's parser accepts in a file, and that PyYAML reads as text."""

MAX_HINTS = 20
"""Unknown keys of a file with a hint at the right key: the search for a hint takes longer than all other checks."""


class Leaf(msgspec.Struct, frozen=True):
    """A value. `missing` is the error if it is not given; empty for an optional value."""

    parse: Reading[object]
    help: str = ""
    default: object = None
    missing: str = ""


class Branch(msgspec.Struct, frozen=True):
    """A mapping of these keys and no others."""

    keys: Mapping[str, "Node"]
    help: str = ""


class Rows(msgspec.Struct, frozen=True):
    """A list of mappings. `missing` as for a value; an empty list counts as not given."""

    row: Branch
    help: str = ""
    missing: str = ""


class Table(msgspec.Struct, frozen=True):
    """A mapping from keys that `key` reads to values of one kind. `key` must accept only one spelling of a key."""

    key: Reading[object]
    value: Leaf
    help: str = ""


Node = Leaf | Branch | Rows | Table


def in_known_case(tree: Branch, document: Document) -> Document:
    """Return a document with its keys in the case of the tree: NVIDIA's parser (Go's encoding/json) ignores the case of keys.

    A key that occurs in two cases is not changed, so that it is refused.
    """
    moved: dict[Place, Place] = {}
    content = _in_known_case(tree, document.content, (), (), moved)
    if not moved:
        return document
    lines = {moved.get(place, place): line for place, line in document.lines.items()}
    return Document.of(content, document.source, lines)


def _in_known_case(node: Node | None, value: object, was: Place, becomes: Place, moved: dict[Place, Place]) -> object:
    """Return the value with its keys in the case of the tree, and add changed places to `moved`, from `was` to `becomes`."""
    if was != becomes:
        moved[was] = becomes
    if isinstance(value, list) and (node is None or isinstance(node, Rows)):
        row = node.row if isinstance(node, Rows) else None
        return [_in_known_case(row, item, (*was, at), (*becomes, at), moved) for at, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    keys = node.keys if isinstance(node, Branch) else {}
    known = {key.lower(): key for key in keys}
    written = [str(name).lower() for name in value]
    found: dict[object, object] = {}
    for name, inner in value.items():
        lower = str(name).lower()
        key = known[lower] if name not in keys and lower in known and written.count(lower) == 1 else name
        found[key] = _in_known_case(keys.get(str(key)), inner, (*was, str(name)), (*becomes, str(key)), moved)
    return found


class Checked:
    """A document after the check by a tree.

    Attributes:
        content: the document with every value parsed, without keys that are null or invalid. Rows keep their positions.
        faults: all faults, in the order of the document.
    """

    def __init__(self, document: Document, tree: Branch) -> None:
        self.faults: list[Fault] = []
        self._document = document
        self._tree = tree
        self._hints = MAX_HINTS
        self.content = self._branch((), tree, document.content)

    def _branch(self, place: Place, branch: Branch, written: Mapping[str, object]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in written.items():
            name = str(key)
            node = branch.keys.get(name)
            if node is None:
                self._fault((*place, name), self._unknown(place, branch, name))
            elif value is not None:
                faults = len(self.faults)
                read = self._node((*place, name), node, value)
                if len(self.faults) == faults or not isinstance(node, Leaf):
                    found[name] = read
        for name, node in branch.keys.items():
            if isinstance(node, Leaf | Rows) and node.missing and written.get(name) is None:
                self._fault(place, node.missing)
        return found

    def _node(self, place: Place, node: Node, value: object) -> object:
        if isinstance(node, Leaf):
            return self._leaf(place, node, value)
        if isinstance(node, Rows):
            if not isinstance(value, list | tuple):
                self._fault(place, f"a list is needed here, not {shown(value)}")
                return []
            if not value and node.missing:
                self._fault(place, node.missing)
            return [self._node((*place, index), node.row, row) for index, row in enumerate(value)]
        if not isinstance(value, Mapping):
            self._fault(place, f"a mapping is needed here, not {shown(value)}")
            return {}
        return self._table(place, node, value) if isinstance(node, Table) else self._branch(place, node, value)

    def _table(self, place: Place, table: Table, written: Mapping[str, object]) -> dict[object, object]:
        found: dict[object, object] = {}
        for name, value in written.items():
            here = (*place, str(name))
            faults = len(self.faults)
            try:
                key = table.key(name)
            except ValueError as error:
                self._fault(here, str(error))
                continue
            if value is not None:
                read = self._leaf(here, table.value, value)
                if len(self.faults) == faults:
                    found[key] = read
        return found

    def _leaf(self, place: Place, leaf: Leaf, value: object) -> object:
        if leaf.parse in (boolean, boolean_or_auto) and isinstance(value, str):
            value = _ONE_LETTER.get(value, value)
        try:
            return leaf.parse(value)
        except ItemError as error:
            self._fault((*place, error.index), str(error))
        except ValueError as error:
            self._fault(place, str(error))
        return None

    def _fault(self, place: Place, reason: str) -> None:
        self.faults.append(self._document.fault(place, shortened(reason, 400)))

    def _unknown(self, place: Place, branch: Branch, name: str) -> str:
        if "." in name:
            return "unknown key; nest mappings instead of writing dots"
        self._hints -= 1
        near = self._meant(place, branch, name) if self._hints >= 0 else ""
        return f"unknown key; did you mean {near}?" if near else "unknown key"

    def _meant(self, place: Place, branch: Branch, name: str) -> str:
        """Return the path that was probably meant, in the same mapping or another mapping; empty if no key is similar."""
        import difflib  # noqa: PLC0415 - only for unknown keys

        name = name[:80]
        here = {_folded(key): spell((*place, key)) for key in branch.keys}
        # Of several keys with one name, the last in this order wins: nearby, in a mapping of the file, first in the tree
        candidates = [(_shared(place, each), self._written(each), each) for each in reversed([*_paths(self._tree)])]
        elsewhere = {_folded(each[-1]): spell(each) for *_, each in sorted(candidates, key=itemgetter(0, 1))}
        for known, cutoff in ((here, 1.0), (elsewhere, 1.0), (here, 0.6), (elsewhere, 0.8)):
            near = difflib.get_close_matches(_folded(name), known, 1, cutoff)
            if near:
                return known[near[0]]
        return ""

    def _written(self, place: tuple[str, ...]) -> bool:
        """Whether the file has the mapping around this place."""
        return at(self._document.content, place[:-1]) is not None


def shown(value: object) -> str:
    """Return a value as text for a message, shortened if it is long."""
    return shortened(repr(value), 80)


def _folded(key: str) -> str:
    """Return a key in one form for all its spellings: migStrategy, mig-strategy and MIG_STRATEGY."""
    return key.replace("-", "").replace("_", "").lower()


def _shared(place: Place, other: Place) -> int:
    """Return the number of mappings that contain both places."""
    return len([*takewhile(bool, map(eq, place, other))])


def _paths(branch: Branch, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the place of every key outside of lists."""
    for key, node in branch.keys.items():
        yield (*above, key)
        if isinstance(node, Branch):
            yield from _paths(node, (*above, key))
