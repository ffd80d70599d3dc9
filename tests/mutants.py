"""How much of what decides do the tests hold? `make mutants`: branches that they take, and small changes that they notice.

Coverage is of the packages below by their own tests. The changes are mutmut's, a sample of them with a fixed seed, each tried
against the tests that reach the changed function. Both figures stand in CONTRIBUTING.md: a change of the tests leaves neither
lower. `.venv/bin/mutmut show NAME` shows a change that survived.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).parents[1]
PACKAGES = ("placement", "health", "devices", "containers", "nvml")
TESTS = [f"tests/unit/{package}" for package in PACKAGES]
WORK = ROOT / "mutants"
SEED = 17
MUTMUT = [sys.executable, "-m", "mutmut", "run", "--max-children"]


def covered() -> dict[str, float]:
    """Per cent of lines and branches by package."""
    data = WORK / "coverage"
    packages = ",".join(f"gpu_plugin/{package}" for package in PACKAGES)
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run(
        [*coverage, "run", f"--data-file={data}", "--branch", f"--source={packages}", "-m", "pytest", "-q", *TESTS],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    found = {}
    for package in PACKAGES:
        told = subprocess.run(
            [*coverage, "json", f"--data-file={data}", f"--include=gpu_plugin/{package}/*", "-q", "-o", "-"],
            check=True,
            cwd=ROOT,
            capture_output=True,
        )
        found[package] = json.loads(told.stdout)["totals"]["percent_covered"]
    return found


def results() -> Iterator[tuple[str, int | None]]:
    """Every change by name, and how the tests ended under it; None for one not tried yet."""
    for package in PACKAGES:
        for file in sorted((WORK / "gpu_plugin" / package).rglob("*.meta")):
            yield from json.loads(file.read_bytes())["exit_code_by_key"].items()


def run(names: list[str], workers: int, seconds: float) -> None:
    """Has these changes tried, for so long at most."""
    process = subprocess.Popen([*MUTMUT, str(workers), *names], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def main() -> int:
    """Prints both figures."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=200, help="changes to try")
    parser.add_argument("--minutes", type=float, default=20, help="how long to try them")
    parser.add_argument("--workers", type=int, default=2, help="how many at once")
    asked = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    for package, share in covered().items():
        print(f"{package:10} {share:5.1f} % of lines and branches", flush=True)

    # One function's changes first: so all there are are made, and which tests reach which function is known.
    run(["gpu_plugin.devices.device.*__mutmut_1"], asked.workers, 3600)
    names = sorted(name for name, _ in results())
    chosen = random.Random(SEED).sample(names, min(asked.sample, len(names)))
    began = time.monotonic()
    run(chosen, asked.workers, 60 * asked.minutes)
    outcome = {name: status for name, status in results() if name in set(chosen) and status is not None}
    lived = sorted(name for name, status in outcome.items() if status_by_exit_code[status] in ("survived", "no tests"))
    told = Counter(status_by_exit_code[status] for status in outcome.values())
    for name in lived:
        print(f"survived: {name}")
    print(f"{len(outcome)} of {len(names)} changes in {time.monotonic() - began:.0f} s: {dict(told)}")
    print(f"score: {100 * (1 - len(lived) / max(1, len(outcome))):.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
