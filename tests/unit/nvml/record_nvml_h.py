"""Record the structures, constants and functions of nvml.h that the package uses, in `nvml_h.json`.

    python -m tests.unit.nvml.record_nvml_h NAME=HEADER [NAME=HEADER...]

The first header is recorded under its name. For the others, the record lists the names in which they differ. The script needs
a C compiler (cc) and no library. The header is part of the CUDA toolkit and of the Python packages nvidia-nvml-dev and
nvidia-nvml-dev-cu12.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.unit.nvml import header

RECORD = Path(__file__).parent / "nvml_h.json"

_KIND = """
#define KIND(x) _Generic((x), double: "double", \\
    unsigned char: "unsigned", unsigned short: "unsigned", unsigned int: "unsigned", unsigned long: "unsigned", \\
    unsigned long long: "unsigned", signed char: "signed", short: "signed", int: "signed", long: "signed", \\
    long long: "signed", unsigned char*: "bytes", char*: "text", default: "other")
"""


def record(text: str, path: Path) -> dict[str, Any]:
    """Return the record of this header, without names that it lacks."""
    members = {name: found for name in header.STRUCTURES if (found := _members(text, name))}
    constants = [name for name in header.constants() if re.search(rf"\b{name}\b", text)]
    lines = [f'#include "{path}"', "#include <stdio.h>", "#include <stddef.h>", _KIND, "int main(void) {"]
    for name, each in members.items():
        lines.append(f'printf("S {name} - %zu -\\n", sizeof({name}));')
        for member in each:
            there = f"(({name}*)0)->{member}"
            lines.append(
                f'printf("M {name}.{member} %zu %zu %s\\n", offsetof({name}, {member}), sizeof({there}), KIND({there}));'
            )
    lines += [f'printf("C {name} %lld - -\\n", (long long)({name}));' for name in constants]
    lines += ["return 0; }"]
    with tempfile.TemporaryDirectory() as made:
        source, program = Path(made, "facts.c"), Path(made, "facts")
        source.write_text("\n".join(lines), encoding="ascii")
        subprocess.run(["cc", "-std=c11", "-w", "-o", program, source], check=True)
        told = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    structures: dict[str, Any] = {}
    values: dict[str, int] = {}
    for line in told.splitlines():
        what, name, first, second, kind = line.split()
        if what == "C":
            values[name] = int(first)
        elif what == "S":
            structures[name] = {"size": int(second), "members": {}}
        else:
            structure, _, member = name.partition(".")
            structures[structure]["members"][member] = [int(first), int(second), kind]
    functions = {name: types for name in header.FUNCTIONS if (types := _arguments(text, name)) is not None}
    return {"structures": structures, "constants": values, "functions": functions}


def _members(text: str, name: str) -> list[str]:
    """Return the names of a structure's members, in order."""
    found = re.search(rf"typedef struct\s*\w*\s*\{{((?:(?!typedef)[^{{}}])*)\}}\s*{name};", text)
    return re.findall(r"(\w+)(?:\[\w+\])?\s*;", _bare(found[1])) if found else []


def _arguments(text: str, name: str) -> list[str] | None:
    """Return the types of a function's arguments."""
    found = re.search(rf"nvmlReturn_t\s+DECLDIR\s+{name}\s*\(([^)]*)\)", text)
    if not found:
        return None
    each = [" ".join(argument.split()) for argument in found[1].split(",")]
    return [re.sub(r"\s*\w+$", "", one).replace(" *", "*") for one in each if one != "void"]


def _bare(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def _differing(newest: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for kind, facts in other.items() for name, told in facts.items() if newest[kind].get(name) != told]


def main(arguments: list[str]) -> None:
    """Write the record."""
    read = []
    for argument in arguments:
        name, _, path = argument.partition("=")
        file = Path(path).resolve()
        read.append((name, record(file.read_text(encoding="utf-8"), file)))
    (newest, facts), *others = read
    content = {"header": newest, "otherwise_in": {name: _differing(facts, told) for name, told in others}, **facts}
    flat = re.sub(
        r"\[\s+([^][{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(content, indent=1)
    )
    RECORD.write_text(flat + "\n", encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1:])
