"""What the document for operators promises is what there is."""

import re
from pathlib import Path

from gpu_plugin.health.signals import SIGNALS

TEXT = (Path(__file__).parents[3] / "docs" / "health.md").read_text()
ROWS = re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \| (?:[A-Z]|by the policy)", TEXT, re.MULTILINE)


def test_the_table_has_every_signal_and_no_other():
    told = {name for row in ROWS for name in re.findall(r"`([a-z-]+)`", row)}
    assert told == {*SIGNALS, "unreadable"}  # which is no signal: the driver cannot even describe such a GPU
