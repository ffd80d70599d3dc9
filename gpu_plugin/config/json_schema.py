"""The JSON Schema of the config file, made from the structs by which the daemon reads files.

`schema.json` in this directory has the result of `text`. The schema accepts every file that the daemon accepts, if its keys have
the same case as here. Only `gpu-plugin validate` finds faults that JSON Schema cannot describe, such as two entries that
contradict each other, or names against Kubernetes' rule.
"""

import json
from collections.abc import Mapping

import msgspec

from gpu_plugin.config.document import Place
from gpu_plugin.config.schema import Key, Rows, Table, dotted, keys_of
from gpu_plugin.config.schema_v1 import File
from gpu_plugin.config.values import Reading

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, object]:
    """Return the JSON Schema 2020-12 of the whole file."""
    return {
        "$schema": DIALECT,
        "title": "gpu-plugin configuration",
        "description": "Configuration of gpu-plugin: NVIDIA's schema v1, read strictly.",
        "type": ["object", "null"],
        **_section(File, ()),
    }


def text() -> str:
    """Return the schema of `json_schema` as the text of `schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _section(section: type[msgspec.Struct], place: Place) -> dict[str, object]:
    """Return the keywords of a section."""
    keys = keys_of(section, dotted(place))
    required = [name for name, key in keys.items() if key.required]
    return {
        "properties": {name: _key(key, (*place, name)) for name, key in keys.items()},
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _key(key: Key, place: Place) -> dict[str, object]:
    """Return the schema of a key's value. Unless the key is required, the value may be null, which counts as not set."""
    schema: dict[str, object] = {"description": key.help}
    if isinstance(key.kind, Reading):
        schema |= key.kind.schema
    elif isinstance(key.kind, Rows):
        schema |= {"type": "array", "items": {"type": "object", **_section(key.kind.section, place)}}
        if key.required:
            schema["minItems"] = 1
    elif isinstance(key.kind, Table):
        values = {key.kind.names.schema["pattern"]: _or_null(key.kind.values.schema)}
        schema |= {"type": "object", "patternProperties": values, "additionalProperties": False}
    else:
        schema |= {"type": "object", **_section(key.kind, place)}
    default = {} if key.default in (None, "") else {"default": key.default}
    return {**(schema if key.required else _or_null(schema)), **default}


def _or_null(schema: Mapping[str, object]) -> dict[str, object]:
    if "enum" in schema:
        assert isinstance(schema["enum"], list)
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        assert isinstance(schema["anyOf"], list)
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = schema["type"]
    return {**schema, "type": [*(kinds if isinstance(kinds, list) else [kinds]), "null"]}
