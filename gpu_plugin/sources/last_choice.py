"""The config file that a node's label chose and whose settings were in force last, remembered over restarts.

The API server may be away at the next start.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.state.directory import Identity, StateDirectory, identity

CHOICE_FILE = "chosen-configuration.json"
"""Its name in the state directory that flags and environment name: the config file itself may name another."""


class ChosenFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds: by which label of which node, which file of which directory was chosen; "" for none at all."""

    node: str
    label: str
    directory: str
    file: str


class LastChoice:
    """Reads and writes that choice. Both block for as long as the disk does, and neither raises."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._state = StateDirectory(Path(settings.state_dir))
        self._path = self._state.path / CHOICE_FILE
        self._found: Identity | None = None

    def read(self) -> str | None:
        """The file chosen last by the same label of the same node, from the same directory; None where none is known."""
        known = self._state.read(CHOICE_FILE, ChosenFile)
        self._found = identity(self._path)
        return known.file if known is not None and known == self._of(known.file) else None

    @property
    def is_current(self) -> bool:
        """Whether what was read or written last is there still: it may have been removed, or its directory renamed."""
        return identity(self._path) == self._found

    def write(self, file: str) -> bool:
        """Has this choice outlive the process. Returns whether that worked.

        Where it did not, nothing is left of the choice of before: without one nothing is served while the label is not known, by
        an old one what the operator no longer wants would be.
        """
        written = self._state.write(CHOICE_FILE, self._of(file))
        if not written:
            with suppress(OSError):
                self._path.unlink()
        self._found = identity(self._path)
        return written

    def _of(self, file: str) -> ChosenFile:
        settings = self._settings
        return ChosenFile(
            node=settings.node_name, label=settings.node_label, directory=settings.config_file_srcdir, file=file
        )
