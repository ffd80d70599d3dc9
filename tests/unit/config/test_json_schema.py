import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import gpu_plugin.config
from gpu_plugin.config import json_schema
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import OPTIONS
from tests.unit.config.test_schema import leaves, mappings
from tests.unit.config.written_files import contents

BOUNDED = hypothesis_settings(max_examples=30, deadline=None)

SCHEMA: Any = json_schema.json_schema()
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
KEYWORDS = {
    *("$schema", "title", "description", "default", "type", "enum", "const", "anyOf", "properties", "required"),
    *("additionalProperties", "patternProperties", "items", "minItems", "maxItems", "uniqueItems"),
    *("pattern", "minLength", "minimum", "maximum"),
}


def is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind])


def takes(schema: Any, value: Any) -> bool:
    """Whether a value conforms, by the meaning of the keywords that this schema uses (JSON Schema 2020-12)."""
    assert schema.keys() <= KEYWORDS
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds and not any(is_of(value, kind) for kind in kinds):
        return False
    if "enum" in schema and not any(type(one) is type(value) and one == value for one in schema["enum"]):
        return False
    if "const" in schema and schema["const"] != value:
        return False
    if "anyOf" in schema and not any(takes(one, value) for one in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        known = {key: [schema for name, schema in properties.items() if name == key] for key in value} | {
            key: [schema for pattern, schema in patterns.items() if re.search(pattern, key, re.ASCII)]
            for key in value
            if key not in properties
        }
        return (
            set(schema.get("required", ())) <= value.keys()
            and (schema.get("additionalProperties", True) or all(known.values()))
            and all(takes(one, inner) for key, inner in value.items() for one in known[key])
        )
    if isinstance(value, list):
        unique = len({json.dumps(item) for item in value}) == len(value)
        return (
            schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
            and (unique or not schema.get("uniqueItems"))
            and all(takes(schema.get("items", {}), item) for item in value)
        )
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0) and bool(re.search(schema.get("pattern", ""), value, re.ASCII))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def resolves(content: Any) -> bool:
    try:
        resolve({}, {}, content)
    except ConfigError:
        return False
    return True


def test_the_shipped_file_is_what_the_code_says():
    shipped = Path(gpu_plugin.config.__file__).with_name("schema.json").read_text()
    assert shipped == json_schema.text(), "gpu-plugin validate --schema > gpu_plugin/config/schema.json"


def test_it_is_a_schema_of_2020_12_that_forbids_unknown_keys_everywhere():
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    objects = [part for _, part in mappings(SCHEMA) if "properties" in part and "type" in part]
    assert len(objects) > 10
    assert all(part["additionalProperties"] is False for part in objects)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.file], ids=lambda option: option.name)
def test_every_option_with_a_place_in_the_file_stands_there_with_its_words_and_default(option):
    part = SCHEMA
    for key in option.file.split("."):
        part = part["properties"][key]
    assert part["description"] == option.help
    assert part.get("default") == (None if option.default in {None, ""} else option.default)
    if "default" in part:
        assert takes(part, part["default"])


@BOUNDED
@given(contents())
def test_it_takes_what_the_daemon_takes(content):
    assert resolves(content)
    assert takes(SCHEMA, content)


@BOUNDED
@given(contents(), st.data())
def test_it_takes_no_unknown_key_and_no_value_of_a_wrong_kind(content, data):
    place, holder = data.draw(st.sampled_from([*mappings(content)]))
    holder["unheardOf"] = 1
    assert not takes(SCHEMA, content)
    del holder["unheardOf"]
    places = [*leaves(content)]
    if places:
        *above, last = data.draw(st.sampled_from(places))
        inner: Any = content
        for step in above:
            inner = inner[step]
        inner[last] = {"a": [1]}
        assert not takes(SCHEMA, content)
        assert not resolves(content), place


written = st.sampled_from(
    [
        *(None, True, False, 0, 1, 2, 48, 49, 83886, 83887, -1, 1.5),
        *(
            "",
            "all",
            "auto",
            "envvar",
            "auto,envvar",
            " auto,,auto",
            "0",
            "0:1",
            "true",
            "v1",
            "8Gi",
            "x",
            "/",
            "1s",
            "5d",
        ),
    ]
)
anything = written | st.lists(written, max_size=2)


@BOUNDED
@given(st.sampled_from([option for option in OPTIONS if option.file]), anything)
def test_it_refuses_nothing_that_the_daemon_takes_for_an_option(option, value):
    content: Any = value
    for key in reversed(option.file.split(".")):
        content = {key: content}
    if resolves(content):
        assert takes(SCHEMA, content)


@BOUNDED
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(["name", "rename", "devices", "replicas", "limits"], anything)))
def test_it_refuses_nothing_that_the_daemon_takes_for_a_shared_resource(row):
    for section in ("timeSlicing", "mps"):
        content = {"flags": {"mpsRoot": "/a"}, "sharing": {section: {"resources": [row]}}}
        if resolves(content):
            assert takes(SCHEMA, content)
