"""Generate the manifests of this directory and parts of the chart: `python -m deploy.generate [--check] [--helm FILE]`.

The generated parts of the chart are the table of values, and the choices in values.schema.json and values.yaml.

The manifests are the output of `helm template` without the parts that only Helm uses: hooks, and the labels with Helm's name.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy import choices
from tests.cluster.harness.binaries import KUBERNETES_VERSIONS

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "gpu-plugin"
DEPLOY = ROOT / "deploy"

RELEASE, NAMESPACE = "gpu-plugin", "kube-system"

HOW_TO_HELM = (
    "install Helm 3 or 4 (https://helm.sh/docs/intro/install), or name one that lies elsewhere: "
    "make manifests HELM=/path/to/helm"
)
"""The advice if helm is not found."""

Template = Callable[[Mapping[str, Any]], str]
"""A function that returns the output of `helm template` for some values, for release `RELEASE` and namespace `NAMESPACE`."""

DEFAULT_CONFIG = """\
version: v1
"""
SHARED_CONFIG = """\
version: v1
sharing:
  timeSlicing:
    resources:
      - {name: nvidia.com/gpu, replicas: 4}
"""
MPS_CONFIG = """\
version: v1
sharing:
  mps:
    resources:
      - {name: nvidia.com/gpu, replicas: 4}
"""

MANIFESTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpu-plugin.yaml": (
        "The device plugin, for nodes whose container runtime is NVIDIA's.",
        {},
    ),
    "gpu-plugin-with-config.yaml": (
        "The device plugin with two configs; nodes with the label nvidia.com/device-plugin.config=time-slicing take the second.",
        {"config": {"map": {"default": DEFAULT_CONFIG, "time-slicing": SHARED_CONFIG}}},
    ),
    "gpu-plugin-with-mps.yaml": (
        "The device plugin and MPS control daemons, for nodes with the label nvidia.com/device-plugin.config=mps.",
        {"config": {"map": {"default": DEFAULT_CONFIG, "mps": MPS_CONFIG}}},
    ),
}
"""The description and the chart's values of each manifest, by file name."""

HEADER = """\
# {}
# Generated from helm/gpu-plugin by deploy/generate.py. Build the image, push it, and put its name in the place of
# gpu-plugin:{}; then: kubectl apply -f {}
"""

POD = "gpu-pod.yaml"
POD_HEADER = """\
# A pod that asks for a GPU, and names the device nodes that it was given: kubectl apply -f {}, then kubectl logs gpu-pod
# Generated from helm/gpu-plugin by deploy/generate.py. Any image does, and any command.
"""

README_HEADER = """\
# The chart's values

Generated from values.yaml by deploy/generate.py. `null` leaves an option to the plugin's own default. Values of NVIDIA's chart
keep their names. How to install is in [docs/install.md](../../docs/install.md).
"""

_OF_HELM = re.compile(r" *(helm\.sh/chart|app\.kubernetes\.io/managed-by): ")
_KEY = re.compile(r"( *)(?:# )?([A-Za-z]+):(?: .*)?$")


def files(template: Template) -> Iterator[tuple[Path, str]]:
    """Return the path and the content of every generated file."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for name, (what, given) in MANIFESTS.items():
        header = HEADER.format(what, version, name)
        yield DEPLOY / name, header + "".join(f"---\n{text}" for text in _without_helm(template(given)))
    yield DEPLOY / POD, POD_HEADER.format(POD) + _pod(template({}))
    values = choices.values((CHART / "values.yaml").read_text())
    yield CHART / "values.yaml", values
    yield CHART / "values.schema.json", choices.schema((CHART / "values.schema.json").read_text())
    yield CHART / "README.md", readme(values)


def readme(values: str) -> str:
    """Return a table of all values, from the headings of values.yaml and the comment before each key."""
    lines = [README_HEADER]
    for heading, path, comment, default in _documented(values):
        if heading:
            lines += [f"\n## {heading}\n\n", "| value | default | what it is |\n|---|---|---|\n"]
        if path:
            lines.append(
                f"| `{path}` | {f'`{default}`' if default else ''} | {comment.replace('|', chr(92) + '|')} |\n"
            )
    return "".join(lines)


def _documented(values: str) -> Iterator[tuple[str, str, str, str]]:
    """Return the path, comment and default of each value, with an empty heading. Each heading is a separate item."""
    whole = yaml.safe_load(values)
    comment: list[str] = []
    above: list[str] = []
    for line in values.splitlines():
        stripped = line.strip()
        key = _KEY.match(line)
        if stripped.startswith("# --- "):
            yield stripped.strip("# -"), "", "", ""
            comment = []
        elif key and (not stripped.startswith("#") or stripped.endswith(":")):
            path = [*above[: len(key[1]) // 2], key[2]]
            default = _at(whole, path)
            if isinstance(default, dict) and line.endswith(":"):
                above = path
            else:
                yield "", ".".join(path), " ".join(comment), "" if stripped.startswith("#") else json.dumps(default)
            comment = []
        elif stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
        elif not stripped:
            comment = []


def _at(values: Any, path: list[str]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _without_helm(rendered: str) -> Iterator[str]:
    """Return the documents of `helm template`'s output without hooks, as text, without the lines that only Helm uses."""
    for document in re.split(r"^---\n", rendered, flags=re.MULTILINE):
        content = yaml.safe_load(document)
        if content and "helm.sh/hook" not in (content["metadata"].get("annotations") or {}):
            kept = (
                line for line in document.splitlines() if not line.startswith("# Source:") and not _OF_HELM.match(line)
            )
            yield "\n".join(line for line in kept if line.strip()) + "\n"


def _pod(rendered: str) -> str:
    """Return the pod of `helm test` as a manifest that users can apply."""
    (pod,) = (each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "Pod")
    pod["metadata"] = {"name": POD.removesuffix(".yaml")}
    return str(yaml.dump(pod, Dumper=_Dumper, sort_keys=False, width=120))


class _Dumper(yaml.SafeDumper):
    """Writes text with several lines as a YAML literal block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def with_helm(program: str) -> Template:
    """Return a Template that calls the helm program at `program`. It raises CalledProcessError if helm fails."""

    def template(values: Mapping[str, Any]) -> str:
        command = [program, "template", RELEASE, str(CHART), "--namespace", NAMESPACE]
        command += ["--kube-version", KUBERNETES_VERSIONS[0], "--set", f"image.repository={RELEASE}"]
        done = subprocess.run(
            [*command, "--values", "-"], input=json.dumps(values), capture_output=True, text=True, check=True
        )
        return done.stdout

    return template


def main() -> int:
    """Write the files or, with --check, print the names of outdated files. Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is outdated")
    parser.add_argument("--helm", default="helm", help="the helm program [default: helm on the search path]")
    given = parser.parse_args()
    if shutil.which(given.helm) is None:
        parser.exit(2, f"make manifests: the program {given.helm} does not exist: {HOW_TO_HELM}\n")
    stale = [
        (path, text) for path, text in files(with_helm(given.helm)) if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        if not given.check:
            path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {'outdated, run make manifests' if given.check else 'written'}")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
