"""What goes wrong with an MPS daemon."""


class MpsError(Exception):
    """A daemon cannot be started, reached or kept; `str()` is a sentence that says why."""


class NotStartedError(MpsError):
    """A program is not there or cannot be started, which says nothing of the daemon that it was to ask."""
