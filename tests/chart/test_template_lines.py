"""Each line of each template matters: without it, some values give something else. So does each condition: always met or never
met, too. Lines that begin or end a block are left alone, since no template is whole without them.
"""

import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.chart.helm import CHART, Helm, RefusedError
from tests.chart.test_values import NOTES, REFUSED
from tests.chart.value_table import MATRIX, TABLE, values_of

TEMPLATES = CHART / "templates"
CONDITION = re.compile(r"(\s*\{\{- (?:else )?if )(.+?)( -?\}\}.*)")
VALUE = re.compile(r"values\.([A-Za-z.]+)", re.IGNORECASE)
BLOCK = re.compile(r"\{\{-? (range|with|define|end)\b")
FILES = tuple(sorted(str(path.relative_to(TEMPLATES)) for path in TEMPLATES.rglob("*.*")))

CASES = (*MATRIX, *(values for values, _ in REFUSED))


def _said(helm: Helm, values: Mapping[str, Any], chart: Path, *, notes: bool) -> str:
    try:
        said = helm.notes(values, chart) if notes else helm.template(values, chart)
    except RefusedError as refused:
        return str(refused)
    # Where an empty line is makes no difference in what follows.
    return "\n".join(line for line in said.splitlines() if line.strip())


def _changed(text: str) -> Iterator[tuple[int, str]]:
    """Numbers, from 0, of lines that may be changed, and what comes in their place: nothing, or another condition."""
    comment = False
    for at, line in enumerate(text.splitlines()):
        stripped = line.strip()
        comment = comment or stripped.startswith("{{- /*")
        if stripped and not comment:
            if condition := CONDITION.match(line):
                yield from ((at, f"{condition[1]}{met}{condition[3]}\n") for met in ("true", "false"))
            elif not BLOCK.match(stripped):
                yield at, ""
        comment = comment and not stripped.endswith("*/}}")


def _named(line: str) -> list[int]:
    """Cases that are about the values that a line names, by their place in `CASES`."""
    return [CASES.index(values_of(path)) for path in VALUE.findall(line) if path in TABLE]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_no_line_is_idle(helm: Helm, tmp_path: Path, name: str) -> None:
    notes = name == "NOTES.txt"
    cases = [values for values, _ in NOTES] if notes else list(CASES)
    with ThreadPoolExecutor(2) as pool:
        whole = dict(enumerate(pool.map(lambda values: _said(helm, values, CHART, notes=notes), cases)))
        lines = (TEMPLATES / name).read_text().splitlines(keepends=True)
        likely = list(whole)  # the case that told last is asked first
        turn = threading.Lock()

        def matters(numbered: tuple[int, tuple[int, str]]) -> bool:
            number, (at, other) = numbered
            chart = tmp_path / str(number) / "gpu-plugin"
            shutil.copytree(CHART, chart)
            (chart / "templates" / name).write_text("".join([*lines[:at], other, *lines[at + 1 :]]))
            for case in (*(() if notes else _named(lines[at])), *likely):
                if _said(helm, cases[case], chart, notes=notes) != whole[case]:
                    with turn:
                        likely.remove(case)
                        likely.insert(0, case)
                    return True
            return False

        changes = list(_changed("".join(lines)))
        told = pool.map(matters, enumerate(changes))
        idle = [
            f"{name}:{at + 1}: {lines[at].strip()} -> {other.strip() or 'nothing'}"
            for (at, other), matter in zip(changes, told, strict=True)
            if not matter
        ]
    assert not idle
