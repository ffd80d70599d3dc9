"""The documents name what exists: files, headings, values of the chart, commands, options, variables."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_plugin.cli import VERBS
from gpu_plugin.config.options import OPTIONS

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
        return  # it tells of what was
    text = re.sub(r"\(\S*\)", "", document.read_text())  # links are another test's
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


def test_the_glossary_explains_each_term_once_and_is_found_from_where_people_begin():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    terms = [term for row in rows for term in row.split(", ") if row != "term"]
    assert len(terms) > 60
    assert sorted(terms) == sorted(set(terms))
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "(docs/glossary.md)" in (ROOT / page).read_text()
