"""Helm as a function from values to what it renders."""

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.harness.binaries import KUBERNETES_VERSIONS

CHART = Path(__file__).parents[2] / "helm" / "gpu-plugin"

IMAGE = Path(__file__).with_name("image_values.yaml")
"""Values that every installation must have. Others win over them."""

RELEASE, NAMESPACE = "try", "gpu-room"

Values = Mapping[str, Any]
Object = Mapping[str, Any]


class RefusedError(Exception):
    """Helm refused the chart or its values; the text is what it says."""


@dataclass(frozen=True)
class Helm:
    """One helm program."""

    program: Path

    def template(self, values: Values, chart: Path = CHART) -> str:
        """Return the output of `helm template`. Raises RefusedError."""
        written = json.dumps(values)
        return self._kept(written) if chart == CHART else self._rendered(written, chart)

    def objects(self, values: Values) -> list[Object]:
        """The same, parsed. Raises RefusedError."""
        return [each for each in yaml.safe_load_all(self.template(values)) if each]

    def notes(self, values: Values, chart: Path = CHART) -> str:
        """Return the notes of an installation. Raises RefusedError."""
        said = self.run("install", RELEASE, str(chart), "--dry-run=client", stdin=json.dumps(values))
        return said.partition("\nNOTES:\n")[2]

    def run(self, verb: str, *arguments: str, stdin: str = "{}") -> str:
        """Run a verb with values from standard input and return its output. Raises RefusedError."""
        command = [str(self.program), verb, *arguments, "--namespace", NAMESPACE]
        command += ["--values", str(IMAGE), "--values", "-"]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RefusedError(done.stderr.strip())
        return done.stdout

    @functools.cache  # noqa: B019 - one instance for a session
    def _kept(self, values: str) -> str:
        return self._rendered(values, CHART)

    def _rendered(self, values: str, chart: Path) -> str:
        return self.run("template", RELEASE, str(chart), "--kube-version", KUBERNETES_VERSIONS[0], stdin=values)


def overlaid(values: Values, more: Values) -> dict[str, Any]:
    """Values with more values over them, mappings merged."""
    result = dict(values)
    for key, value in more.items():
        under = result.get(key)
        result[key] = overlaid(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return result


def at_path(path: str, value: Any) -> dict[str, Any]:
    """Values that have `value` at a dotted path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def facts(objects: list[Object]) -> set[str]:
    """Every scalar, and every empty list or mapping, as `Kind.path=value`.

    Items of lists have their name as key, or else their position. The value of an environment variable is directly at its name.
    """
    return {fact for each in objects for fact in _facts(each["kind"], each)}


def _facts(path: str, content: Any) -> Iterator[str]:
    if isinstance(content, Mapping) and content:
        if set(content) == {"name", "value"}:
            yield f"{path}={content['value']}"
        else:
            for key, value in content.items():
                yield from _facts(f"{path}.{key}", value)
    elif isinstance(content, list) and content:
        for at, item in enumerate(content):
            key = item.get("name", at) if isinstance(item, Mapping) else at
            yield from _facts(f"{path}.{key}", item)
    else:
        yield f"{path}={content if isinstance(content, str) else json.dumps(content)}"


def pods(objects: list[Object]) -> dict[str, Any]:
    """The specification of each pod there is, by the component it belongs to."""
    found = {}
    for each in objects:
        metadata = each["metadata"]
        if each["kind"] == "Pod":
            found[metadata["labels"]["app.kubernetes.io/component"]] = each["spec"]
        elif each["kind"] in {"DaemonSet", "Job"}:
            found[metadata["labels"]["app.kubernetes.io/component"]] = each["spec"]["template"]["spec"]
    return found
