"""The error that a person can mend: a flag, an environment variable or a file that asks for what cannot be."""


class ConfigError(ValueError):
    """What is wrong, where, and what would be right, in one sentence. `str()` of it is shown as it is."""
