"""Writes the tables that the package ships as the daemon reads them: JSON beside the YAML that people read and edit.

    python tables/generate.py            # write them
    python tables/generate.py --check    # say which differ; exit status 1 where one does

Reading YAML takes a start 15 ms and 1 MiB: its library is imported for it, and comments and ranges are read anew each time.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpu_plugin.simulation.profile import parse

PACKAGE = Path(__file__).resolve().parent.parent / "gpu_plugin"


def written() -> Mapping[Path, str]:
    """What each JSON file is to hold, by its path."""
    tables = {profile: _profile(profile) for profile in sorted((PACKAGE / "simulation" / "profiles").glob("*.yaml"))}
    return {source.with_suffix(".json"): _as_json(content) for source, content in tables.items()}


def _profile(source: Path) -> dict[str, Any]:
    """A simulated node, with the uuid of each GPU written out: to make one takes OpenSSL's hashes, 0.6 MiB and 1.5 ms."""
    content: dict[str, Any] = yaml.safe_load(source.read_text())
    named = [gpu.uuid for gpu in parse(content, source.stem).gpus]
    each = content.get("gpus", [])
    each += [{} for _ in named[len(each) :]]
    content["gpus"] = [gpu | {"uuid": uuid} for gpu, uuid in zip(each, named, strict=True)]
    return content


def _as_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Writes or checks. Returns the exit status."""
    stale = {path: text for path, text in written().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(PACKAGE.parent))
        if "--check" not in arguments:
            path.write_text(text)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
