"""The JSON Schema of the config file, made from the tree by which the daemon reads files.

`schema.json` in this directory has the result of `text`. The schema accepts every file that the daemon accepts, if its keys have
the same case as here. Only `gpu-plugin validate` finds faults that JSON Schema cannot describe, such as two entries that
contradict each other, or names against Kubernetes' rule.
"""

import json
from collections.abc import Mapping

from gpu_plugin.config.schema import Leaf, Node, Rows, Table
from gpu_plugin.config.schema_v1 import SCHEMA

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, object]:
    """Return the JSON Schema 2020-12 of the whole file."""
    return {"$schema": DIALECT, "title": "gpu-plugin configuration", **_of(SCHEMA)}


def text() -> str:
    """Return the schema of `json_schema` as the text of `schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _of(node: Node, *, null: bool = True) -> dict[str, object]:
    """Return the schema of a node. With `null`, its value may be null, which counts as not set."""
    about: dict[str, object] = {"description": node.help} if node.help else {}
    if isinstance(node, Leaf):
        default = {} if node.default in (None, "") else {"default": node.default}
        return {**about, **(_or_null(node.parse.schema) if null else node.parse.schema), **default}
    if isinstance(node, Rows):
        rows = {"type": ["array", "null"] if null else "array", "items": _of(node.row, null=False)}
        return {**about, **rows, **({"minItems": 1} if node.missing else {})}
    about["type"] = ["object", "null"] if null else "object"
    if isinstance(node, Table):
        values = {str(node.key.schema["pattern"]): _of(node.value)}
        return {**about, "patternProperties": values, "additionalProperties": False}
    required = [key for key, inner in node.keys.items() if isinstance(inner, Leaf | Rows) and inner.missing]
    return {
        **about,
        "properties": {key: _of(inner, null=key not in required) for key, inner in node.keys.items()},
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _or_null(schema: Mapping[str, object]) -> dict[str, object]:
    if "enum" in schema:
        assert isinstance(schema["enum"], list)
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        assert isinstance(schema["anyOf"], list)
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = schema["type"]
    return {**schema, "type": [*(kinds if isinstance(kinds, list) else [kinds]), "null"]}
