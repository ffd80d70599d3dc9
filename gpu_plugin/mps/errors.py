"""Errors of MPS daemons."""


class MpsError(Exception):
    """A daemon cannot be started, reached or kept running. The text is a sentence with the reason."""


class NotStartedError(MpsError):
    """A program is missing or cannot be started. So the state of the daemon that it should query is unknown."""
