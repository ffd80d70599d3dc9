"""The limit on the length of a Unix socket's path. Pure."""

LONGEST = 107  # bytes: sun_path has 108, and the last is a zero (unix(7), Linux)


def room(path: str) -> int:
    """Return how many bytes may follow a path; below 0 if the path itself is too long."""
    return LONGEST - len(path.encode(errors="surrogateescape"))
