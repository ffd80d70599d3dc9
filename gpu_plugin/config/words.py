"""Words that messages of every room have in common: how many of something, and a text that is cut. Pure."""


def counted(count: int, noun: str) -> str:
    """So many of something: `1 GPU`, `2 GPUs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def are(count: int) -> str:
    """The verb for so many."""
    return "is" if count == 1 else "are"


def shortened(text: str, length: int) -> str:
    """The text; of one that has more characters than `length`, as much of its beginning as leaves room for `...` after it."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
