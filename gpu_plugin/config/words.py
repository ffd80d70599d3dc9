"""Helpers for messages: numbers with nouns, and shortened texts. Pure."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 GPU`, `2 GPUs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def are(count: int) -> str:
    """Return the verb for a number: "is" or "are"."""
    return "is" if count == 1 else "are"


def shortened(text: str, length: int) -> str:
    """Return the text; if it has more characters than `length`, its beginning and `...`, with `length` characters together."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
