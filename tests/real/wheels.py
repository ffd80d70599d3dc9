"""The wheels that `requirements/run.lock` names by hash, for each supported Python and processor, from pip's package index.

They are in `${XDG_CACHE_HOME:-~/.cache}/gpu-plugin-e2e`, a directory for each state of the lock file.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cluster.harness.binaries import MissingError, cache_directory, locked_cache
from tests.real.image_build import ROOT, run

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
LOCK = ROOT / "requirements/run.lock"


def find(python: str, processor: str) -> Path:
    """Return the directory of the wheels. Raises MissingError if they were not fetched yet."""
    place = _directory() / f"{python}-{processor}"
    if not place.is_dir():
        raise MissingError(f"not on this machine: the wheels of {LOCK.name} for Python {python} on {processor}")
    return place


def install(say: Callable[[str], None]) -> Path:
    """Fetch the missing wheels, and return their directory. Raises MissingError if there is no wheel with such a hash."""
    with locked_cache():
        for processor, machine in MACHINES.items():
            for python in PYTHONS:
                place = _directory() / f"{python}-{processor}"
                if not place.is_dir():
                    say(f"fetching wheels for Python {python} on {processor}")
                    _fetch(place, python, machine)
    return _directory()


def _fetch(place: Path, python: str, machine: str) -> None:
    making = place.with_name(f"{place.name}.making")
    platforms = [f"--platform=manylinux{glibc}_{machine}" for glibc in ("2014", "_2_28", "_2_34")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--require-hashes",
        "--only-binary=:all:",
        "--no-deps",
    ]
    where = [f"--python-version={python}", f"--dest={making}", f"--requirement={LOCK}"]
    try:
        run([*command, *platforms, *where])
    except AssertionError as error:
        raise MissingError(f"the wheels of {LOCK.name} for Python {python} on {machine}: {error}") from error
    making.rename(place)


def _directory() -> Path:
    return cache_directory() / f"wheels-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]}"
