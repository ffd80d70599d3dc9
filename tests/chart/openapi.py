"""JSON schemas of Kubernetes' objects, strict ones, from the OpenAPI document in the source of each version.

That document lies in the Go module k8s.io/kubernetes (api/openapi-spec/swagger.json). The schemas made of it are kept in the
cache of the cluster tests, by version and by this file.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.harness import binaries

MODULE = "k8s.io/kubernetes"

KINDS = frozenset(
    {
        ("", "v1", "ConfigMap"),
        ("", "v1", "Pod"),
        ("", "v1", "ServiceAccount"),
        ("apps", "v1", "DaemonSet"),
        ("batch", "v1", "Job"),
        ("networking.k8s.io", "v1", "NetworkPolicy"),
        ("rbac.authorization.k8s.io", "v1", "ClusterRole"),
        ("rbac.authorization.k8s.io", "v1", "ClusterRoleBinding"),
        ("rbac.authorization.k8s.io", "v1", "Role"),
        ("rbac.authorization.k8s.io", "v1", "RoleBinding"),
    }
)

_TEXT: Mapping[str, Any] = {"type": "string"}
_LABELS: Mapping[str, Any] = {"type": "object", "additionalProperties": _TEXT}


def _closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


# The fields that the chart uses (Prometheus operator, monitoring.coreos.com/v1; not part of Kubernetes).
POD_MONITOR = _closed(
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "PodMonitor"},
    metadata=_closed(name=_TEXT, namespace=_TEXT, labels=_LABELS, annotations=_LABELS),
    spec=_closed(
        selector=_closed(matchLabels=_LABELS),
        podMetricsEndpoints={
            "type": "array",
            "items": _closed(
                port=_TEXT,
                path={"type": "string", "pattern": "^/"},
                honorLabels={"type": "boolean"},
                interval={"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"},
                scrapeTimeout={"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"},
                relabelings={
                    "type": "array",
                    "items": _closed(sourceLabels={"type": "array", "items": _TEXT}, targetLabel=_TEXT),
                },
            ),
        },
    ),
)

PROMETHEUS_RULE = _closed(
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "PrometheusRule"},
    metadata=_closed(name=_TEXT, namespace=_TEXT, labels=_LABELS, annotations=_LABELS),
    spec=_closed(
        groups={
            "type": "array",
            "items": _closed(
                name=_TEXT,
                rules={
                    "type": "array",
                    "items": _closed(
                        alert=_TEXT,
                        record=_TEXT,
                        expr=_TEXT,
                        labels=_LABELS,
                        annotations=_LABELS,
                        **{"for": {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}},
                    ),
                },
            ),
        },
    ),
)


def find(version: str) -> Path:
    """The directory of a version's schemas, `<kind>-<group>-<version>.json`. Raises MissingError where it was not made yet."""
    directory = _directory(version)
    if not directory.is_dir():
        raise binaries.MissingError(f"not on this machine: schemas of Kubernetes {version}")
    return directory


def install(version: str, say: Callable[[str], None]) -> Path:
    """The same, but make it if it is missing, after a call of `say`. Raises MissingError where the source cannot be had."""
    directory = _directory(version)
    with binaries.locked_cache() as cache:
        if not directory.is_dir():
            say(f"making schemas of Kubernetes {version}: some 10 seconds, once")
            with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as place:
                source = binaries.module_source(MODULE, version, Path(place))
                document = json.loads((source / "api/openapi-spec/swagger.json").read_text())
                made = Path(place) / "schemas"
                made.mkdir()
                for name, schema in schemas(document):
                    (made / f"{name}.json").write_text(json.dumps(schema))
                made.rename(directory)
    return directory


def schemas(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and schema of each of `KINDS` in the form for kubeconform, and of the Prometheus operator's kinds."""
    definitions = document["definitions"]
    for name, definition in definitions.items():
        for kind in definition.get("x-kubernetes-group-version-kind", ()):
            if (kind["group"], kind["version"], kind["kind"]) in KINDS:
                used = {each: _strict(each, definitions[each]) for each in _reached(name, definitions)}
                group = [kind["group"].partition(".")[0]] if kind["group"] else []
                yield "-".join([kind["kind"].lower(), *group, kind["version"]]), used[name] | {"definitions": used}
    yield "podmonitor-monitoring-v1", POD_MONITOR
    yield "prometheusrule-monitoring-v1", PROMETHEUS_RULE


def _directory(version: str) -> Path:
    made_by = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return binaries.cache_directory() / f"schemas-{version}-{made_by}"


def _reached(name: str, definitions: Mapping[str, Any]) -> set[str]:
    found, new = set[str](), {name}
    while new:
        found |= new
        new = {ref for each in new for ref in _references(definitions[each])} - found
    return found


def _references(content: Any) -> Iterator[str]:
    if isinstance(content, Mapping):
        if isinstance(ref := content.get("$ref"), str):
            yield ref.removeprefix("#/definitions/")
        for value in content.values():
            yield from _references(value)


def _strict(name: str, content: Any) -> Any:
    """A definition without unknown fields, and with the types that the API server takes where OpenAPI 2 cannot say so."""
    if not isinstance(content, Mapping):
        return content
    if content.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    if name.endswith(".Quantity"):
        return {"type": ["number", "string"]}
    kept = {
        key: {field: _strict("", value) for field, value in content[key].items()}
        if key == "properties"
        else _strict("", content[key])
        for key in ("type", "properties", "additionalProperties", "items", "required", "enum", "$ref")
        if key in content
    }
    return kept | (
        {"additionalProperties": False} if "properties" in kept and "additionalProperties" not in kept else {}
    )
