"""The sources of images: wheels are pinned by hash, and bases by digest."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """By normalised name: the version, and the hashes."""
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)(?: ; [^#]*?)?((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*$", line)
        assert match, f"{name}: not a pinned requirement with hashes: {line}"
        found[normal(match[1])] = (match[2], match[3].split())
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[<>=!~ \[;]", each, maxsplit=1)[0]) for each in requirements}


@pytest.mark.parametrize("name", ["run.lock", "build.lock", "dev.lock"])
def test_every_line_is_one_version_by_hash(name):
    assert len(locked(name)) > 10


def test_the_image_has_what_the_project_needs_and_what_the_node_label_needs():
    wanted = names(PROJECT["project"]["dependencies"]) | names(PROJECT["project"]["optional-dependencies"]["kube"])
    assert wanted <= set(locked("run.lock"))


def test_nothing_that_builds_or_tests_is_in_the_image():
    unwanted = names(PROJECT["dependency-groups"]["dev"]) - names(PROJECT["project"]["dependencies"])
    assert not {*unwanted, "pip", "setuptools"} & set(locked("run.lock"))


def test_the_image_is_built_with_what_is_locked():
    assert names(PROJECT["dependency-groups"]["image"]) <= set(locked("build.lock"))
    assert names(PROJECT["build-system"]["requires"]) <= set(locked("build.lock"))


def test_the_default_bases_of_the_image_are_pinned_by_digest():
    bases = re.findall(r"^ARG (?:BUILD_)?BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(bases) == 2
    assert all(re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", base) for base in bases)


def test_tests_run_with_the_versions_that_the_image_has():
    run, dev = locked("run.lock"), locked("dev.lock")
    assert {name: version for name, (version, _) in run.items()}.items() <= {
        name: version for name, (version, _) in dev.items()
    }.items()


def test_the_dockerfile_is_short_and_has_two_stages():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert len(lines) <= 40
    assert sum(line.startswith("FROM ") for line in lines) == 2
