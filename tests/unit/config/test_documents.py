"""What the documents show is what the reader takes."""

import re
from pathlib import Path

import pytest

from gpu_plugin.config.document import parse
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import Verdicts

ROOT = Path(__file__).parents[3]
SHOWN = [
    pytest.param(block, id=f"{name} {at}")
    for name in ("README.md", "docs/configuration.md")
    for at, block in enumerate(re.findall(r"^```yaml\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL))
]


def test_there_are_some():
    assert len(SHOWN) >= 3


@pytest.mark.parametrize("block", SHOWN)
def test_a_file_that_a_document_shows_is_valid(block):
    settings = resolve({}, {}, parse(block.encode(), "shown"))
    assert settings.sharing or settings.verdicts != Verdicts()
    names = {pattern.name for pattern in (*settings.gpu_names, *settings.mig_names)}
    assert all(not names or entry.name in names for entry in settings.sharing)
