"""What this plugin wrote on its Node, remembered in the state directory: a restart with the option off has it removed."""

from typing import Final

import msgspec

OWN_MARKS_FILE: Final = "cluster.json"


class OwnMarks(msgspec.Struct, frozen=True):
    """Whether the condition and the taint may be on the Node."""

    condition: bool = False
    taint: bool = False
