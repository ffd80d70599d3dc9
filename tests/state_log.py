"""Reads and changes the records in a daemon's state directory."""

import json
from pathlib import Path
from typing import Any

from gpu_plugin.state.log import EVENT, StateLog, read_log


def stored(state: Path, kind: str) -> Any:
    """Return the content of the record that a restart reads, or None. For events, return a list of all."""
    content = read_log(state)
    if kind == EVENT:
        return [json.loads(record.content) for record in content.events]
    record = content.latest.get(kind)
    return None if record is None else json.loads(record.content)


def store(state: Path, kind: str, content: object) -> None:
    """Replace the record while no daemon runs. An event is added."""
    log = StateLog(state)
    log.load()
    assert log.add_event(content) if kind == EVENT else log.write(kind, content)
    log.release()
