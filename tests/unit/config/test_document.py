import time
from collections.abc import Iterator

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpu_plugin.config.document import MAX_BYTES, MAX_VALUES, Document, Place, parse, spell
from gpu_plugin.config.errors import ConfigError

BOUNDED = hypothesis_settings(max_examples=30, deadline=None)


def faults(text: str | bytes) -> list[str]:
    """Return the faults of a text."""
    with pytest.raises(ConfigError) as caught:
        parse(text if isinstance(text, bytes) else text.encode(), "f")
    return [str(fault) for fault in caught.value.faults]


def content(text: str) -> object:
    return parse(text.encode(), "f").content


# Values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1", -1),
        ("0x10", 16),
        ("010", 8),
        ("08", "08"),
        ("1.5", 1.5),
        ("true", True),
        ("off", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("10.0", 10),
        ("1e+3", "1e+3"),
        ("y", "y"),
        ("text", "text"),
        ("'1'", "1"),
        ("1:1", "1:1"),
        ("0:1", "0:1"),
        ("1:30.5", "1:30.5"),
        ("2020-01-01", "2020-01-01"),
        ("=", "="),
        ("[1, a]", [1, "a"]),
        ("{b: {c: 1}}", {"b": {"c": 1}}),
        ("!!str 1", "1"),
        ("|\n  two\n  lines", "two\nlines"),
    ],
)
def test_values_are_what_nvidias_parser_makes_of_them(text, value):
    assert content(f"a: {text}") == {"a": value}


@pytest.mark.parametrize("key", ["1", "true", "null", "~", "2020-01-01", "1.5"])
def test_keys_are_text_as_it_is_written(key):
    assert content(f"{key}: x") == {key: "x"}


JSON = '{\n\t"a":\t{\n\t\t"b": [\n\t\t\t1,\n\t\t\t"x\\ty"\n\t\t]\n\t}\n}\n'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((nothing, {}) for nothing in ("", "# nothing\n", "---\n", "null", "---\n...\n", "\ufeff")),
        *((f"a: 1\n{end}", {"a": 1}) for end in ("---", "---\n", "---\n# no more\n", "...\n", "---\n---\n")),
        ("\ufeffa: 1", {"a": 1}),
        ('{"a": {"b": [1, "x\\ty"]}}', {"a": {"b": [1, "x\ty"]}}),
        (JSON, {"a": {"b": [1, "x\ty"]}}),
        ("a: '{{ b }}'", {"a": "{{ b }}"}),
    ],
)
def test_a_file_is_one_mapping_or_nothing(text, value):
    assert content(text) == value


def test_merged_mappings_yield_to_what_stands_there_and_to_those_before_them():
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz:\n  <<: [*x, *y]\n  a: 3\n"
    assert content(text) == {"x": {"a": 1, "b": 1}, "y": {"b": 2, "c": 2}, "z": {"a": 3, "b": 1, "c": 2}}


# Lines

NESTED = """\
a: 1
b:
  c:
    - d: 2
      e: 3

    - 4
  "f g": {h: 5,
    i: [6,
      7]}
"""


def places(value: object, place: Place = ()) -> Iterator[Place]:
    """The place of every key and item."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in inner:
        yield (*place, step)
        yield from places(item, (*place, step))


def test_every_key_and_item_has_its_line_and_column():
    read = parse(NESTED.encode(), "f")
    faults = [read.fault(place, "") for place in places(read.content)]
    assert {fault.path: (fault.line, fault.column) for fault in faults} == {
        "a": (1, 1),
        "b": (2, 1),
        "b.c": (3, 3),
        "b.c[0]": (4, 7),
        "b.c[0].d": (4, 7),
        "b.c[0].e": (5, 7),
        "b.c[1]": (7, 7),
        "b.f g": (8, 3),
        "b.f g.h": (8, 11),
        "b.f g.i": (9, 5),
        "b.f g.i[0]": (9, 9),
        "b.f g.i[1]": (10, 7),
    }


def test_what_is_not_there_has_the_line_of_what_is_around_it():
    read = parse(NESTED.encode(), "f")
    assert read.line(("b", "c", 1, "x", "y")) == 7
    assert read.line(("z",)) == 0
    assert Document.of({"a": 1}).line(("a",)) == 0


def test_aliased_and_merged_values_have_the_line_where_they_are_written():
    read = parse(b"x: &x\n  a: 1\ny: *x\nz:\n  <<: *x\n  b: 2\n", "f")
    assert [read.line(place) for place in (("y",), ("y", "a"), ("z", "a"), ("z", "b"))] == [3, 2, 2, 6]


keys = st.text("abcxyz", min_size=1, max_size=4).filter(lambda key: yaml.safe_load(key) == key)
trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@BOUNDED
@given(st.dictionaries(keys, trees, min_size=1, max_size=5), st.booleans())
def test_what_yaml_writes_is_read_back_and_each_line_is_the_right_one(tree, flow):
    text = yaml.safe_dump(tree, default_flow_style=flow)
    read = parse(text.encode(), "f")
    assert read.content == tree
    lines = [*text.split("\n")]
    for place in places(tree):
        if isinstance(place[-1], str):
            fault = read.fault(place, "")
            assert lines[fault.line - 1][fault.column - 1 :].startswith(f"{place[-1]}:")


# What cannot be read


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\na: 2", "f:2: a: appears twice, first on line 1"),
        ('{"a": 1,\n "a": 1}', "f:2: a: appears twice, first on line 1"),
        ("a:\n- b: 1\n  c: 2\n  b: 3", "f:4: a[0].b: appears twice, first on line 2"),
        ("a: b: c", "f:1: mapping values are not allowed here"),
        ("x: 1\na: [1, 2\n", "f:3: while parsing a flow sequence: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\nb: *x", "f:2: found undefined alias 'x'"),
        ("a: &x 1\nb: &x 2", "f:2: found duplicate anchor 'x'"),
        ("a: 1\n---\n---\nb: 2", "f:3: a second document begins here; one is read"),
        ("a: 1\n---\n''", "f:2: a second document begins here; one is read"),
        ("a: 1\n---\nb: 2", "f:2: a second document begins here; one is read"),
        ("a:\n\t- b", "f:2: a tab where YAML requires spaces"),
        ("a:\n  b: \0", "f:2: the character #x0000 is not allowed in YAML"),
        ("- a", "f: holds a list, not a mapping"),
        ("text", "f: holds text, not a mapping"),
        ("3", "f: holds 3, not a mapping"),
        ("a: &a [*a]", "f:1: a[0]: an alias that contains itself"),
        ("a: &a\n  <<: *a", "f:2: a: '<<' merges other mappings, and nothing else"),
        ("a:\n  <<: 1", "f:2: a: '<<' merges other mappings, and nothing else"),
        ("a: 1\n[b]: 2", "f:2: a key here is not text"),
        ("a: !!binary abc", "f:1: a: the tag !!binary has no meaning here"),
        ("a: !!set {b}", "f:1: a: the tag !!set has no meaning here"),
        ("a: !!python/name:os.system x", "f:1: a: the tag !!python/name:os.system has no meaning here"),
        ("a: !!int x", "f:1: a: 'x' is not a valid whole number"),
        ("a: !!bool x", "f:1: a: 'x' is not true or false"),
        ("a: !!float ''", "f:1: a: '' is not a valid number"),
        (f"a: {2**63}", f"f:1: a: '{2**63}' is not a valid whole number"),
        (f"a: {'9' * 5000}", f"f:1: a: '{'9' * 40}' is not a valid whole number"),
        ('a: "\\ud83d"', "f:1: a: an unpaired surrogate is not a character"),
        ('"\\ud83d": a', "f:1: '\\ud83d': an unpaired surrogate is not a character"),
        (b"a: b\nc: \xff", "f:2: not UTF-8 text"),
        ("[" * 60, "f:1: nested more than 50 deep"),
        ("{a: " * 60, "f:1: nested more than 50 deep"),
        ("[" + "1," * MAX_VALUES + "]", f"f:1: more than {MAX_VALUES} values"),
        (b"#" * (MAX_BYTES + 1), f"f: more than {MAX_BYTES} bytes, the most that a ConfigMap holds"),
    ],
)
def test_what_cannot_be_read_is_one_line(text, fault):
    assert faults(text) == [fault]
    assert "\n" not in fault


@pytest.mark.parametrize("doubling", ["{a%d: &a%d [*a%d, *a%d, *a%d]}", "&a%d {<<: [*a%d, *a%d, *a%d], b%d: 1}"])
def test_an_alias_bomb_is_refused_before_it_goes_off(doubling):
    first = "- &a0 {x: 1}\n"
    if doubling.startswith("{"):
        rows = [doubling % (at, at, at - 1, at - 1, at - 1) for at in range(1, 40)]
    else:
        rows = [doubling % (at, at - 1, at - 1, at - 1, at) for at in range(1, 40)]
    [fault] = faults("all:\n" + first + "".join(f"- {row}\n" for row in rows))
    assert fault == f"f:1: aliases make more than {MAX_VALUES} values of it"


def test_every_fault_of_the_values_is_told():
    assert faults("a: !!int x\nb: 1\nb: 2\nc: !!set {d}\n") == [
        "f:1: a: 'x' is not a valid whole number",
        "f:3: b: appears twice, first on line 2",
        "f:4: c: the tag !!set has no meaning here",
    ]


@BOUNDED
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_whatever_is_in_a_file_is_a_document_or_faults_of_one_line(written):
    try:
        read = parse(written, "f")
    except ConfigError as error:
        assert error.faults  # noqa: PT017
        assert all("\n" not in str(fault) for fault in error.faults)  # noqa: PT017
    else:
        assert isinstance(read.content, dict)


# Places


def test_places_as_a_person_reads_them():
    places: dict[Place, str] = {
        (): "",
        ("a", "b", 0, "c"): "a.b[0].c",
        ("a", 0, 1): "a[0][1]",
        ("",): "''",
        ("a\nb", "c"): "'a\\nb'.c",
        ("k" * 100,): "k" * 80 + "...",
    }
    assert [spell(place) for place in places] == [*places.values()]


PIECES = st.sampled_from(
    [
        *"ay\n[]{}'\"|>\té%@~",
        "b: ",
        "- ",
        "\n  ",
        ", ",
        "#x",
        "&x ",
        "*x",
        "<<: ",
        "? ",
        "1.0",
        "!!str ",
        "---\n",
        "...",
        "\\u00e9",
    ]
)


@given(st.lists(PIECES, max_size=14).map("".join))
@hypothesis_settings(max_examples=400, deadline=None)
def test_libyaml_and_pyyaml_read_the_same_of_what_both_take(text):
    def read():
        try:
            return parse(text.encode(), "f").content
        except ConfigError:
            return None

    fast = read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "__with_libyaml__", False)
        slow = read()
    assert slow is None or fast == slow  # libyaml takes a few more: tabs after a colon, for one


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML is without libyaml here")
def test_a_file_full_of_comments_is_read_at_once():
    began = time.process_time()
    assert content("#" * (MAX_BYTES - 20) + "\na: 1") == {"a": 1}
    assert time.process_time() - began < 0.25


@pytest.mark.parametrize(
    "text",
    [
        "version: v1\nflags: {migStrategy: {{ .Values.migStrategy }}}\n",
        "version: v1\nflags:  {{- if .Values.mig }}\n  migStrategy: mixed\n{{- end }}\n",
        "version: v1\n{{ toYaml .Values.config }}\n",
    ],
)
def test_a_template_that_was_not_rendered_is_said_in_one_fault(text):
    [fault] = faults(text)
    assert fault.startswith("f:2: ")
    assert "template" in fault
