"""Each line of each template has an effect: some values render differently without it. The same holds for each condition, if it
is always or never met. Lines that begin or end a block stay, because a template is invalid without them.

Many copies of the chart, each with one line changed and with values of its own, are rendered by one helm program, as charts
within a chart.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import CHART, IMAGE, Helm, Values, overlaid
from tests.chart.test_null import RICH
from tests.chart.test_values import NOTES, REFUSED
from tests.chart.value_table import MATRIX, TABLE, values_of
from tests.cluster.harness.binaries import KUBERNETES_VERSIONS

TEMPLATES = CHART / "templates"
CONDITION = re.compile(r"(\s*\{\{- (?:else )?if )(.+?)( -?\}\}.*)")
VALUE = re.compile(r"values\.([A-Za-z.]+)", re.IGNORECASE)
BLOCK = re.compile(r"\{\{-? (range|with|define|end)\b")
FAIL = re.compile(r"\{\{- fail (.+) \}\}")
SOURCE = re.compile(r"^---\n# Source: lines/(?:charts/(copy-[0-9]{5})|templates)/.*\n", re.MULTILINE)
BROKEN = re.compile(r"lines/charts/(copy-[0-9]{5})/templates")
COPY = re.compile(r"copy-[0-9]{5}")
ABOUT = (CHART / "Chart.yaml").read_text()
VALUES = json.dumps(overlaid(*(yaml.safe_load(path.read_text()) for path in (CHART / "values.yaml", IMAGE))))
WHOLE = {str(path.relative_to(TEMPLATES)): path.read_text() for path in sorted(TEMPLATES.rglob("*.*"))}
FILES = {
    "alerts/gpu-plugin.yaml": (CHART / "alerts" / "gpu-plugin.yaml").read_text(),
    "dashboards/gpu-plugin.json": "{}",  # the real file is long, and no template reads its content
}
"""Files that templates read."""
CASES: tuple[Values, ...] = (RICH, *MATRIX, *(values for values, _ in REFUSED), *(values for values, _ in NOTES))
AT_ONCE = 25
"""Copies for one helm program."""


@dataclass(frozen=True)
class Change:
    """A line of a template (number from 0) and its replacement. Without a file nothing is changed."""

    file: str = ""
    at: int = 0
    other: str = ""

    def templates(self) -> Mapping[str, str]:
        """Text of each template with the change."""
        if not self.file:
            return WHOLE
        lines = WHOLE[self.file].splitlines(keepends=True)
        lines[self.at] = self.other
        return {**WHOLE, self.file: "".join(lines)}

    def __str__(self) -> str:
        line = WHOLE[self.file].splitlines()[self.at]
        return f"{self.file}:{self.at + 1}: {line.strip()} -> {self.other.strip() or 'nothing'}"


def _changes(file: str, text: str) -> Iterator[Change]:
    comment = False
    for at, line in enumerate(text.splitlines()):
        stripped = line.strip()
        comment = comment or stripped.startswith("{{- /*")
        # Comments of a manifest have no effect.
        if stripped and not comment and not (stripped.startswith("# ") and file.endswith(".yaml")):
            if condition := CONDITION.match(line):
                yield from (Change(file, at, f"{condition[1]}{met}{condition[3]}\n") for met in ("true", "false"))
            elif not BLOCK.match(stripped):
                yield Change(file, at)
        comment = comment and not stripped.endswith("*/}}")


def _template(name: str, change: Change) -> str:
    """Return all templates in one file, with names of their own, and with a printed reason in place of each failure."""
    definitions, manifests = [], []
    for file, text in change.templates().items():
        own = text.replace('"gpu-plugin.', f'"{name}.')
        if file.endswith(".tpl"):
            definitions.append(own)
        elif file == "NOTES.txt":
            definitions.append(f'{{{{ define "{name}.notes" }}}}{own}{{{{ end }}}}')
        else:
            own = FAIL.sub(r'{{ printf "\\n---\\nkind: Refused\\nwhy: %s\\n" (\1 | quote) }}', own)
            manifests.append(f"{{{{ if true }}}}\n{own}\n{{{{ end }}}}")  # a variable is local to its file
    manifests.append(f'kind: Notes\nsaid: {{{{ include "{name}.notes" . | quote }}}}\n')
    return "\n".join(definitions) + "\n---\n".join(manifests)


def _said(helm: Helm, asked: Sequence[tuple[Change, Values]]) -> list[str]:
    """Return the text that each change renders for its values; empty if helm cannot render it."""
    copies = {f"copy-{number:05}": each for number, each in enumerate(asked)}
    with tempfile.TemporaryDirectory() as place:
        chart = Path(place)
        (chart / "Chart.yaml").write_text("apiVersion: v2\nname: lines\nversion: 0.0.0\n")
        # With this no YAML is looked at: helm fails in the end, and all is printed as the templates have it.
        (chart / "templates").mkdir()
        (chart / "templates" / "broken.yaml").write_text("no: YAML: at all\n")
        for name, (change, _) in copies.items():
            copy = chart / "charts" / name
            (copy / "templates").mkdir(parents=True)
            (copy / "Chart.yaml").write_text(ABOUT.replace("name: gpu-plugin", f"name: {name}"))
            (copy / "values.yaml").write_text(VALUES)
            (copy / "templates" / "all.yaml").write_text(_template(name, change))
            for file, text in FILES.items():
                (copy / file).parent.mkdir()
                (copy / file).write_text(text)
        left = dict(copies)
        while left:
            rendered, fault = _rendered(helm, chart, {name: values for name, (_, values) in left.items()})
            if not fault:
                break
            for name in set(BROKEN.findall(fault)) & set(left) or pytest.fail(fault):
                del left[name]
                shutil.rmtree(chart / "charts" / name)
    said = dict.fromkeys(copies, "")
    _, *sources = SOURCE.split(rendered if left else "")
    for name, text in zip(sources[::2], sources[1::2], strict=True):
        # Hooks are printed once more at the end. Where an empty line is makes no difference in what follows.
        if name and not said[name]:
            said[name] = COPY.sub("gpu-plugin", "\n".join(line for line in text.splitlines() if line.strip()))
    return list(said.values())


def _rendered(helm: Helm, chart: Path, values: Mapping[str, Values]) -> tuple[str, str]:
    """Return the rendered text, and the error, which is empty if helm rendered all copies."""
    how = ["--kube-version", KUBERNETES_VERSIONS[0], "--debug", "--values", "-"]
    command = [str(helm.program), "template", "try", str(chart), *how]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
    return done.stdout, "" if SOURCE.search(done.stdout) else done.stderr


def _all_said(helm: Helm, asked: Sequence[tuple[Change, Values]], at_once: int = AT_ONCE) -> list[str]:
    parts = (asked[at : at + at_once] for at in range(0, len(asked), at_once))
    with ThreadPoolExecutor(2) as pool:
        return [each for told in pool.map(lambda part: _said(helm, part), parts) for each in told]


def _likely(change: Change) -> list[int]:
    """Cases that are about the values that a line names, by their place in `CASES`."""
    line = WHOLE[change.file].splitlines()[change.at]
    return [CASES.index(values_of(path)) for path in VALUE.findall(line) if path in TABLE]


@pytest.mark.timeout(0)  # how long a helm run takes is up to the machine
def test_no_line_is_idle(helm: Helm) -> None:
    whole = _all_said(helm, [(Change(), values) for values in CASES])
    changes = [change for file, text in WHOLE.items() for change in _changes(file, text)]
    assert len(changes) > 300
    assert whole.count("") == 1  # the case with an invalid config
    assert len(set(whole)) > 150
    told = Counter[int]()
    asked: dict[Change, set[int]] = {change: set() for change in changes}
    size = 1
    while any(len(cases) < len(CASES) for cases in asked.values()):
        often = [0, *(case for case, _ in told.most_common()), *range(len(CASES))]
        pairs = []
        for change, cases in asked.items():
            new = [each for each in dict.fromkeys([*often[: not cases], *_likely(change), *often]) if each not in cases]
            pairs += [(change, case) for case in new[:size]]
        # At first many changes break their template, and each broken copy has helm render the other copies again.
        said = _all_said(helm, [(change, CASES[case]) for change, case in pairs], 6 if size == 1 else AT_ONCE)
        for (change, case), text in zip(pairs, said, strict=True):
            if change in asked:
                asked[change].add(case)
                if text != whole[case]:
                    told[case] += 1
                    del asked[change]
        size *= 2
    assert [str(change) for change in asked] == []
