"""Write the names of the plugin's choices (strategies, policies) into the chart's schema and into comments of values.yaml."""

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
"""Values of the chart that accept one name: the names, and the comment in values.yaml."""

LIST = "deviceListStrategy"
LIST_COMMENT = (
    "The way in which the runtime gets the devices: {}, several with commas or as a list, or auto. "
    "cdi-* and auto need nvidiaDriverRoot."
)
"""The comment of LIST, a value of the chart that accepts several names, or auto."""


def schema(text: str) -> str:
    """Return `text`, the chart's values.schema.json, with the present names of all choices."""
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
    """Return `text`, the chart's values.yaml, with the present names of all choices in its comments."""
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
    """Replace the part of the pattern's match after its first group. Raises LookupError unless there is exactly one match."""
    text, times = re.subn(pattern, lambda found: found[1] + becomes, text, flags=re.MULTILINE)
    if times != 1:
        raise LookupError(f"{pattern} matches {times} times in the chart's file, not once")
    return text
