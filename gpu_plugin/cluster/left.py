"""What may be left on our Node of what we wrote there."""

from typing import Final

import msgspec

OWN_MARKS_FILE: Final = "cluster.json"
"""Its name in the state directory."""


class Left(msgspec.Struct, frozen=True):
    """Whether the condition and the taint may be there: a restart with the option off has them removed."""

    condition: bool = False
    taint: bool = False
