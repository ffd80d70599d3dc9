"""The documents name what exists: files, headings, values of the chart, commands, options, variables."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import choices
from gpu_plugin.cli import VERBS
from gpu_plugin.config.choices import ALLOCATION_POLICIES, DEVICE_LIST_STRATEGIES, HEALTH_SIGNALS, MIG_STRATEGIES
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import OPTIONS
from gpu_plugin.config.values import AUTO
from gpu_plugin.doctor.checks import CHECKS

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "bench/*.md", "tests/**/*.md", "helm/**/*.md")
    for path in ROOT.glob(pattern)
)
FLAGS = {flag for option in OPTIONS for flag in option.flags}
VARIABLES = {env for option in OPTIONS for env in option.envs}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"(?<![\w/.*$-])((?:helm|deploy|docs|requirements|tests|gpu_plugin|bench|proto)/[\w./-]+\w)")
_VALUE = re.compile(r"--set(?:-json|-string)? ([\w.]+)=")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=_name)


def _commands(document: Path) -> Iterator[str]:
    """The lines of every shell block, continued ones joined, without comments."""
    for language, block in _FENCE.findall(document.read_text()):
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                yield re.sub(r"\s#\s.*|^#\s.*", "", line)


@cache
def _anchors(document: Path) -> frozenset[str]:
    """Headings as anchors: lower case, punctuation gone, spaces as hyphens."""
    text = _FENCE.sub("", document.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)


@documents
def test_links_lead_to_files_and_headings(document):
    text = _FENCE.sub("", document.read_text())
    for target in _LINK.findall(text):
        if "://" in target:
            continue
        place, _, anchor = target.partition("#")
        there = (document.parent / place).resolve() if place else document
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), target


@documents
def test_paths_of_this_project_exist(document):
    if document.name == "CHANGELOG.md":
        return  # it describes former versions
    text = re.sub(
        r"^```(?:python|yaml)\n# .*$", "", document.read_text(), flags=re.MULTILINE
    )  # where an example is to go
    text = re.sub(r"\(\S*\)", "", text)  # links are another test's
    for path in _PATH.findall(text):
        assert (ROOT / path).exists() or (document.parent / path).exists(), path


@documents
def test_verbs_and_options_of_commands_exist(document):
    for line in _commands(document):
        for verb, rest in re.findall(r"(?:^|bin/|-- )gpu-plugin (\w[\w-]*)([^|&;]*)", line):
            assert verb in VERBS, line
            if verb in {"run", "mps", "cleanup"}:
                own = {"mount-shm", "mps-control-binary", "mps", "help"}
                assert set(re.findall(r"--([\w-]+)", rest)) <= FLAGS | own, line


def _chart() -> Mapping[str, Any]:
    values: Mapping[str, Any] = yaml.safe_load((ROOT / "helm/gpu-plugin/values.yaml").read_text())
    return values


def _is_value(path: str, values: Any) -> bool:
    first, _, rest = path.partition(".")
    if not isinstance(values, dict):
        return False
    return first in values and (not rest or not values[first] or _is_value(rest, values[first]))


@documents
def test_values_of_the_chart_exist(document):
    values = {**_chart(), "affinity": None}  # unset by default
    text = document.read_text()
    named = set(_VALUE.findall(text))
    if document.name in {"install.md", "security.md", "troubleshooting.md"}:  # where `a.b` and `a: b` are values
        tops = "|".join(values)
        named |= set(re.findall(rf"`((?:{tops})(?:\.\w+)*)(?::[^`]*)?`", text)) - {"kubelet.sock"}
    for path in sorted(named):
        assert _is_value(path, values), path


def test_the_manifest_to_write_oneself_gives_the_pod_what_the_generated_one_gives_it():
    (example,) = [each for kind, each in _FENCE.findall((ROOT / "docs/own-manifest.md").read_text()) if kind == "yaml"]
    generated = (ROOT / "deploy/gpu-plugin.yaml").read_text()
    own, ours = (
        next(each for each in yaml.safe_load_all(text) if each["kind"] == "DaemonSet")["spec"]["template"]["spec"]
        for text in (example, generated)
    )
    assert own["volumes"] == ours["volumes"]
    assert own["tolerations"] == ours["tolerations"]
    (ours_runs,), (own_runs,) = ours["containers"], own["containers"]
    for part in ("securityContext", "volumeMounts", "ports"):
        assert own_runs[part] == ours_runs[part]
    assert all(each in ours_runs["env"] for each in own_runs["env"])
    # The generated manifest also names the directories. They are the default ones.
    named = {each["name"]: each["value"] for each in ours_runs["env"] if each not in own_runs["env"]}
    named_ones, defaults = resolve({}, named), resolve({}, {})
    for directory in (
        "socket_dir",
        "effective_pod_resources_socket",
        "state_dir",
        "cdi_dir",
        "driver_root_ctr_path",
    ):
        assert getattr(named_ones, directory) == getattr(defaults, directory)
    assert len(named) == 5
    assert {arg.partition("=")[0].removeprefix("--") for arg in own_runs["args"]} <= FLAGS


@documents
def test_variables_in_tables_of_options_exist(document):
    for first in re.findall(r"^\| (?:`--[^|]*)?\| (`[A-Z][^|]*) \|", document.read_text(), re.MULTILINE):
        assert set(re.findall(r"`([A-Z_]+)`", first)) <= VARIABLES, first


def test_the_table_of_options_has_their_flags_and_defaults():
    text = (ROOT / "docs/configuration.md").read_text()
    by_flag = {option.flags[0]: option for option in OPTIONS if option.flags}
    rows = re.findall(r"^\| `--([\w-]+)` \| `([A-Z_]+)` \| (`[^`]*`)? ?\|", text, re.MULTILINE)
    assert len(rows) > 10
    for flag, variable, default in rows:
        option = by_flag[flag]
        assert variable in option.envs, flag
        if default and option.default is not None:
            assert default.strip("`").lower() == str(option.default).lower(), flag


TABLES = [  # a document, the head of the first column of a table in it, required names, and allowed names
    ("docs/configuration.md", "MIG strategy", MIG_STRATEGIES, ()),
    ("docs/configuration.md", "strategy", DEVICE_LIST_STRATEGIES, (AUTO,)),
    ("docs/containers.md", "`--device-list-strategy`", DEVICE_LIST_STRATEGIES, (AUTO,)),
    ("docs/configuration.md", "policy", ALLOCATION_POLICIES, ()),
    ("docs/health.md", "signal", HEALTH_SIGNALS, ("unreadable",)),  # the driver cannot even describe such a GPU
    ("docs/doctor.md", "check", CHECKS, ()),
]


def first_column(text: str, head: str) -> set[str]:
    """Return the code names in the first column of the table with this head."""
    _, table = text.split(f"\n| {head} |", 1)
    rows = table.split("\n\n", 1)[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


def missing_rows(text: str, head: str, names: Iterable[str]) -> list[str]:
    """Return the names that the table lacks."""
    told = first_column(text, head)
    return [name for name in names if name not in told]


@pytest.mark.parametrize(
    ("document", "head", "names", "besides"), TABLES, ids=[f"{row[0]}: {row[1]}" for row in TABLES]
)
def test_the_table_of_what_there_is_has_all_of_it_and_nothing_else(document, head, names, besides):
    text = (ROOT / document).read_text()
    missing = missing_rows(text, head, names)
    assert not missing, f"{document}: the table of each {head} has no row for {', '.join(missing)}"
    gone = first_column(text, head) - {*names, *besides}
    assert not gone, f"{document}: the table of each {head} has a row for {', '.join(sorted(gone))}, which there is not"


def test_the_chart_has_every_choice():
    schema, values = ((ROOT / "helm/gpu-plugin" / name).read_text() for name in ("values.schema.json", "values.yaml"))
    assert (choices.schema(schema), choices.values(values)) == (schema, values), "make manifests"
