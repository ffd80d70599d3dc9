"""Text of other programs, made safe to show: encodable, one line, without terminal control characters, and bounded. Pure."""

from collections.abc import Mapping, Sequence

CONTROLS: Mapping[int, str] = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) != "\t"
} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    **{code: f"\\u{code:04x}" for code in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
}
"""Characters that would begin a line of their own, tell a terminal something or turn the direction of writing, and how they
are shown: C0 and C1 (ECMA-48) save the tab, the separators U+2028 and U+2029, and Unicode's bidirectional controls (UAX #9)."""


LONGEST_FOREIGN = 300
"""Characters of a text of another program in one log line or event. An API server's refusals have some 150."""


def excerpt(text: str, longest: int = LONGEST_FOREIGN) -> str:
    """The text; if it has more than `longest` characters, its beginning and how many more there are."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text) - longest} more characters)"


def excerpts(texts: Sequence[str], shown: int = 3) -> str:
    """The first `shown` texts, such as file names, and how many more there are."""
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return f"{', '.join(map(excerpt, texts[:shown]))}{more}"


def encodable(text: str) -> str:
    """The text with lone surrogates, which names that are no UTF-8 have and no encoder takes, shown by their hexadecimal code."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def printable(text: str) -> str:
    """The text as it may be shown to anybody: encodable, and with `CONTROLS` shown instead of obeyed."""
    return encodable(text).translate(CONTROLS)
