"""Text of other programs, made safe to show: encodable, one line, without terminal control characters, and bounded. Pure."""

from collections.abc import Mapping, Sequence

# Characters that begin a line, control a terminal or turn the direction of writing, and the text that replaces each. C0 and C1
# (ECMA-48) without the tab, the separators U+2028 and U+2029, and Unicode's bidirectional controls (UAX #9).
CONTROLS: Mapping[int, str] = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) != "\t"
} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    **{code: f"\\u{code:04x}" for code in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
}


# Characters of a text of another program in one log line or event. An API server's refusals have some 150.
LONGEST_FOREIGN = 300


def excerpt(text: str, longest: int = LONGEST_FOREIGN) -> str:
    """The text; if it has more than `longest` characters, its beginning and how many more there are."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text) - longest} more characters)"


def excerpts(texts: Sequence[str], shown: int = 3) -> str:
    """The first `shown` texts, such as file names, and how many more there are."""
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return f"{', '.join(map(excerpt, texts[:shown]))}{more}"


def encodable(text: str) -> str:
    """The text with lone surrogates, which come from names that are not UTF-8, replaced by their hexadecimal code."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def printable(text: str) -> str:
    """The text, safe for a terminal and a log: encodable, and with `CONTROLS` replaced."""
    return encodable(text).translate(CONTROLS)
