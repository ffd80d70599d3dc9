"""`python -m tests.prose`: compare the readability of each package and document with its limit.

The value is the number of constructions per 1,000 words that make prose hard to read. Prose is the docstrings, comments and
messages (log lines and errors) of Python files, and the text of Markdown files. `prose_limits.toml` has the limits. A limit
only goes down: `--lower` writes the present values where they are lower, and a new package or document starts at NEW_LIMIT.
`--top N` prints the N worst sentences of each name that is given.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).with_name("prose_limits.toml")

HEAD = "# Findings per 1,000 words of each package and document. `python -m tests.prose --lower` writes this file.\n"

NEW_LIMIT = 6.0
SHORTEST = 5
"""Words of the shortest sentence that counts."""

WORD = re.compile(r"[A-Za-z']+")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
CODE = re.compile(r"`[^`]*`")

_NOUN_BEFORE = r"(?:^|[.;:,(]\s*|\b(?:of|by|with|than|for|from|as|and|after|before)\s+)"

RULES: Mapping[str, re.Pattern[str]] = {
    name: re.compile("|".join(patterns), re.IGNORECASE)
    for name, patterns in {
        "a clause with 'what' in place of a noun": (
            _NOUN_BEFORE + r"what\b(?! to\b)",
            r"\bwhat (?:of|by|with|else|since)\b",
        ),
        "a word for people in place of the name of code": (r"\b(?:whoever|whom|nobody|somebody|anybody)\b",),
        "a pronoun in place of a noun": (r"\b(?:one|ones|those|that) (?:that|which|who|of|is|was|has)\b",),
        "code that acts like a person": (
            r"\b(?:(?:un)?heard|hears?|told|saw|forgets?|forgotten)\b",
            r"\b(?:remembers?|remembered|believes?|believed|owed|unsay|upset)\b",
            r"\btells?\b(?! (?:you|people|users?|operators?))",
        ),
        "an idiom": (
            r"\b(?:stands?(?!-in)|comes? (?:to|of)|came (?:to|of)|goes? (?:by|on)|lets? go)\b",
            r"\b(?:taken? for|takes? for|held against|(?:is|are) to be|is owed|had (?:by|of))\b",
        ),
        "a comparison without its second part": (r"\b(?:so many|so long|as much as|at most so|than not)\b",),
        "an old word": (
            r"\b(?:anew|lately|meanwhile|besides?|thereof|wherever)\b",
            r"\b(?:whatever|spelt|upon|alike|likewise)\b",
        ),
        "a negated pronoun": (r"\b(?:(?:is|are|but) none|no such|nothing but|none of (?:these|this|ours|it|them))\b",),
    }.items()
}


class Sentence(NamedTuple):
    """One sentence, the place where its paragraph begins, and its number of findings by rule."""

    where: str
    text: str
    words: int
    findings: Mapping[str, int]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The paragraphs of a file, each with its first line."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from _of_markdown(text)
    else:
        yield from _of_python(text)


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("#"):
            yield number, CODE.sub("X", line.replace("|", ". "))


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                yield node.lineno, docstring
            case ast.Raise(exc=ast.Call(args=[message, *_])) if not isinstance(message, ast.Name):
                yield node.lineno, _literal(message)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "_log")), args=arguments):
                yield node.lineno, " ".join(map(_literal, arguments))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type")):
            yield token.start[0], token.string.lstrip("# ")


def _literal(message: ast.expr) -> str:
    """The literal parts of a string or an f-string; empty for any other expression."""
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_literal(part) if isinstance(part, ast.Constant) else "X" for part in parts)
    return ""


def sentences(path: Path) -> Iterator[Sentence]:
    """The sentences of a file that count."""
    for line, paragraph in prose(path):
        for text in SENTENCE_END.split(" ".join(paragraph.split())):
            words = len(WORD.findall(text))
            if words >= SHORTEST:
                found = {name: len(rule.findall(text)) for name, rule in RULES.items()}
                yield Sentence(
                    f"{path.relative_to(ROOT)}:{line}", text, words, {name: n for name, n in found.items() if n}
                )


def units() -> dict[str, list[Path]]:
    """The files of each package and document, by its path below the root of the repository."""
    found = {str(path.relative_to(ROOT)): [path] for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])}
    for directory in sorted(
        [
            *ROOT.glob("gpu_plugin/*/"),
            *ROOT.glob("tests/*/"),
            ROOT / "demo",
            ROOT / "bench",
            ROOT / "deploy",
            ROOT / "proto",
        ]
    ):
        files = [path for path in sorted(directory.rglob("*.py")) if "_api" not in path.parts]
        if files:
            found[str(directory.relative_to(ROOT))] = files
    return found


def value(found: list[Sentence]) -> float:
    """Findings per 1,000 words, rounded up to a tenth."""
    words = sum(each.words for each in found)
    return -(-10000 * sum(sum(each.findings.values()) for each in found) // max(words, 1)) / 10


def main() -> int:
    """Return the exit status: 1 if a package or document is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true")
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    limits: dict[str, float] = tomllib.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    failed = False
    for name, paths in units().items():
        if asked.names and name not in asked.names:
            continue
        found = [sentence for path in paths for sentence in sentences(path)]
        now, limit = value(found), limits.get(name, NEW_LIMIT)
        if now > limit:
            failed = True
            print(
                f"{name}: {now} findings per 1,000 words, limit {limit}; "
                f"python -m tests.prose --top 20 {name} shows the sentences"
            )
        if asked.names:
            print(f"{name}: {now} findings per 1,000 words, limit {limit}")
            found.sort(key=lambda each: sum(each.findings.values()) / each.words**0.5, reverse=True)
            for each in found[: asked.top]:
                print(f"  {each.where} {each.text}\n    {', '.join(each.findings)}")
        limits[name] = min(now, limit)
    if asked.lower:
        rows = "".join(f'"{name}" = {limit}\n' for name, limit in sorted(limits.items()))
        LIMITS.write_text(
            "# Findings per 1,000 words of each package and document. `python -m tests.prose --lower` writes this file.\n"
            + rows
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
