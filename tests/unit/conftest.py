"""A simulated node, and the end of the log settings and state logs that a test made."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.profile import load
from gpu_plugin.state.log import StateLog


@pytest.fixture
def node() -> SimulatedNode:
    """Eight H100 on an HGX board."""
    return SimulatedNode(load("hgx-h100"))


@pytest.fixture(autouse=True)
def log_settings() -> Iterator[None]:
    """Restore the levels and handlers of the loggers: a daemon sets them for its process."""
    root = logging.getLogger()
    loggers = [root, *(each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger))]
    levels, handlers = [logger.level for logger in loggers], root.handlers[:]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:
            logger.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()


@pytest.fixture(autouse=True)
def state_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the files of all state logs of a test: a daemon keeps them open until its process ends."""
    made: list[StateLog] = []
    begin = StateLog.__init__

    def begun(log: StateLog, state_dir: Path) -> None:
        begin(log, state_dir)
        made.append(log)

    monkeypatch.setattr(StateLog, "__init__", begun)
    yield
    until = time.monotonic() + 10.0
    for log in made:
        while not log.release():  # a write that hung returns on a thread, after the daemon has ended
            assert time.monotonic() < until, "a write hangs after the end of the test"
            time.sleep(0.01)
