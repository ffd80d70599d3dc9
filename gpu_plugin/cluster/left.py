"""What may be left on our Node of what we wrote there."""

import msgspec


class Left(msgspec.Struct, frozen=True):
    """Whether the condition and the taint may be there: a restart with the option off has them removed."""

    condition: bool = False
    taint: bool = False
