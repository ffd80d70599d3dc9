"""Grafana's published types (npm: @grafana/schema), and the TypeScript compiler, which holds a dashboard against them."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.harness import binaries

PACKAGES = {"@grafana/schema": "13.2.3", "typescript": "5.9.3"}

KINDS = {"timeseries": "timeseries", "stat": "stat", "table": "table", "state-timeline": "statetimeline"}
"""Kinds of panels that have their own types, and the directory of the types."""

_PLAIN = """\
import type { Dashboard } from '@grafana/schema';

// JSON has the values of enumerations, not their names.
type Plain<T> = 0 extends 1 & T ? T
  : unknown extends T ? T
  : T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Array<Plain<U>>
  : T extends object ? { [K in keyof T]: Plain<T[K]> }
  : T;
"""


@dataclass(frozen=True)
class Types:
    """The directory that both packages are installed in, and the program that runs the compiler."""

    packages: Path
    node: Path

    def faults(self, dashboard: Mapping[str, Any]) -> list[str]:
        """Return the compiler's errors for a dashboard: unknown fields, and fields of another type."""
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "node_modules").symlink_to(self.packages / "node_modules")
            (folder / "dashboard.ts").write_text("\n".join(_program(dashboard)))
            flags = ["--noEmit", "--strict", "--skipLibCheck", "--pretty", "false", "--target", "es2022"]
            compiler = self.packages / "node_modules" / "typescript" / "bin" / "tsc"
            command = [str(self.node), str(compiler), *flags, "--moduleResolution", "bundler", "--module", "esnext"]
            done = subprocess.run([*command, "dashboard.ts"], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.splitlines() if done.returncode else []


def _program(dashboard: Mapping[str, Any]) -> Iterator[str]:
    yield _PLAIN
    types = "./node_modules/@grafana/schema/dist/types/raw/composable"
    for kind in KINDS.values():
        yield f"import type * as {kind} from '{types}/{kind}/panelcfg/x/types.gen';"
    yield f"export const dashboard: Plain<Dashboard> = {json.dumps(dashboard)};"
    panels = [inner for panel in dashboard["panels"] for inner in (panel, *panel.get("panels", ()))]
    for panel in panels:
        if directory := KINDS.get(panel["type"]):
            name = f"panel{panel['id']}"
            yield f"export const {name}: Plain<Partial<{directory}.Options>> = {json.dumps(panel['options'])};"
            if field := panel["fieldConfig"]["defaults"].get("custom"):
                yield f"export const {name}Field: Plain<Partial<{directory}.FieldConfig>> = {json.dumps(field)};"


def find() -> Types:
    """The types. Raises MissingError where they were not installed yet, or there is no Node.js."""
    if (node := shutil.which("node", path=os.pathsep.join(binaries.SYSTEM_PATH))) is None:
        raise binaries.MissingError("not on this machine: node (Node.js)")
    if not _directory().is_dir():
        raise binaries.MissingError("not on this machine: @grafana/schema")
    return Types(_directory(), Path(node))


def install(say: Callable[[str], None]) -> Types:
    """The same, installed with npm where they are missing. Raises MissingError where that fails."""
    with binaries.locked_cache():
        if not _directory().is_dir():
            say("installing @grafana/schema and TypeScript: 26 MB, once")
            binaries.npm_install(_directory(), [f"{name}@{version}" for name, version in PACKAGES.items()])
    return find()


def _directory() -> Path:
    return binaries.cache_directory() / f"grafana-schema-{PACKAGES['@grafana/schema']}"
