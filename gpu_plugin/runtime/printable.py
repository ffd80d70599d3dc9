"""Text of others, made safe to show: it can be encoded, is one line, and has no terminal control characters. Pure."""

from collections.abc import Mapping

CONTROLS: Mapping[int, str] = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) != "\t"
} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    **{code: f"\\u{code:04x}" for code in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
}
"""Characters that would begin a line of their own, tell a terminal something or turn the direction of writing, and how they
are shown: C0 and C1 (ECMA-48) save the tab, the separators U+2028 and U+2029, and Unicode's bidirectional controls (UAX #9)."""


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
