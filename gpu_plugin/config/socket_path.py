"""How long the path of a Unix socket may be. Pure."""

LONGEST = 107
"""Bytes: sun_path has 108, the last of them a zero (unix(7), Linux)."""


def room(path: str) -> int:
    """How many bytes a path leaves for more of it; below 0 where it is too long itself."""
    return LONGEST - len(path.encode(errors="surrogateescape"))
