"""What operators choose by name as the chart has it, made of the plugin's own tables: its schema, and comments in values.yaml."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence

from gpu_plugin.config.choices import ALLOCATION_POLICIES, DEVICE_LIST_STRATEGIES, MIG_STRATEGIES
from gpu_plugin.config.values import AUTO

CHOICES: Mapping[str, tuple[Sequence[str], str]] = {
    "migStrategy": (tuple(MIG_STRATEGIES), "How MIG devices are offered: {}."),
    "sharedDevicesAllocationPolicy": (tuple(ALLOCATION_POLICIES), "Which GPUs shared devices are taken from: {}."),
}
"""Values that are one choice: what there is, and the comment."""

LIST = "deviceListStrategy"
LIST_COMMENT = (
    "How the runtime is told of devices: {}, several with commas or as a list, or auto. "
    "cdi-* and auto need nvidiaDriverRoot."
)
"""The value that is a list of choices, or auto."""


def schema(text: str) -> str:
    """The chart's values.schema.json with the choices that there are."""
    for value, (names, _) in CHOICES.items():
        text = _once(rf'("{value}": \{{"enum": )\[.*?\]', json.dumps([*names, None]), text)
    names = [*DEVICE_LIST_STRATEGIES]
    one = "|".join(map(re.escape, names)).replace(r"\-", "-")
    text = _once(
        rf'("{LIST}": \{{\s+"type": .*\s+"pattern": )".*"', json.dumps(f"^({AUTO}|({one})(, *({one}))*)?$"), text
    )
    return _once(
        rf'("{LIST}": \{{\s+"type": .*\s+"pattern": .*\s+"items": \{{"enum": )\[.*?\]', json.dumps([*names, AUTO]), text
    )


def values(text: str) -> str:
    """The chart's values.yaml with the choices that there are in its comments."""
    comments = {
        value: words.format(" or ".join((", ".join(names[:-1]), names[-1])))
        for value, (names, words) in CHOICES.items()
    }
    comments[LIST] = LIST_COMMENT.format(", ".join(DEVICE_LIST_STRATEGIES))
    for value, comment in comments.items():
        lines = textwrap.fill(comment, 130, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        text = _once(rf"()(?:^# .*\n)+(?=^{value}:)", f"{lines}\n", text)
    return text


def _once(pattern: str, becomes: str, text: str) -> str:
    """The text with what follows the pattern's first group replaced. Raises LookupError unless it stands there once."""
    text, times = re.subn(pattern, lambda found: found[1] + becomes, text, flags=re.MULTILINE)
    if times != 1:
        raise LookupError(f"{pattern} stands {times} times in the chart's file, not once")
    return text
