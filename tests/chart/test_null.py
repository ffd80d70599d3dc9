"""A value of null, as in an empty section of a values file, counts as not given, or Helm refuses it in a line with its name."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.chart.helm import Helm, RefusedError, at_path, overlaid
from tests.chart.test_values import SCHEMA
from tests.chart.value_table import CDI, MPS

RICH: Mapping[str, Any] = {
    **MPS,
    **CDI,
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "documentation": "https://git.example.com/gpu", "disabled": ["GpuPluginSlow"]},
    "dashboard": {"enabled": True},
    "cluster": {
        "nodeEvents": True,
        "podEvents": True,
        "nodeCondition": True,
        "nodeTaint": "NoSchedule",
        "cordonAnnotation": True,
        "nodeLabels": "file",
    },
    "networkPolicy": {"enabled": True},
    "nvidiaDriverRoot": "/",
}
"""Values under which nearly every line is rendered."""

MEANT = {
    "affinity": "every node",
    "tolerations": "none",
    "dashboard.labels": "none",
    "priorityClassName": "none",
    "failOnInitError": "as the config says",
    "updateStrategy.rollingUpdate": "what Kubernetes has",
}
"""Where null is an answer of its own. The kubelet has defaults for the fields of probes, too."""


def _paths(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in schema.get("properties", {}).items():
        at = f"{path}.{key}" if path else key
        yield at
        yield from _paths(value, at)


PATHS = tuple(_paths(SCHEMA))


def _without(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    kept = {name: value for name, value in values.items() if name != key}
    if rest and isinstance(under := values.get(key), Mapping):
        kept[key] = _without(under, rest)
    return kept


def _fault(helm: Helm, path: str) -> str:
    """Return the fault of the chart if this value is null, or an empty text."""
    try:
        said = helm.template(overlaid(RICH, at_path(path, None)))
    except RefusedError as refused:
        lines = [line for line in str(refused).splitlines() if line.startswith("- at ")]
        named = len(lines) == 1 and all(part in lines[0] for part in path.split("."))
        return "" if named else f"{path}: {refused}"
    if "<nil>" in said or "%!" in said:
        return f"{path}: <nil> in what is rendered"
    meant = path in MEANT or (path.startswith("probes.") and path.count(".") == 2)
    return "" if meant or said == helm.template(_without(RICH, path)) else f"{path}: not what is rendered without it"


@pytest.mark.timeout(0)  # some hundreds of helm runs; how long one takes is up to the machine
def test_null_is_the_default_or_is_refused_in_a_line(helm: Helm, helm3: Helm) -> None:
    with ThreadPoolExecutor(2) as pool:
        faults = [fault for each in (helm, helm3) for fault in pool.map(partial(_fault, each), PATHS) if fault]
    assert faults == []
