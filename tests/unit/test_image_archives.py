"""The archives of test images in the cache: when they are removed, and how a failed build ends."""

import os
import time

import pytest

from tests.cluster.harness.binaries import MissingError
from tests.real import archive, image_build, podman

HOUR = 3600.0

PODMAN = """\
#!/bin/sh
for argument; do case $argument in
  --output=*) echo image > "${argument#--output=}"; exit %d ;;
esac; done
"""
"""A stand-in that builds nothing, saves a small file, and exits with this status."""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and the stand-in for podman."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(podman, "find", lambda: None)
    base = tmp_path / "base"
    base.mkdir()
    monkeypatch.setattr(archive, "debian_system", lambda packages: base)
    save(tmp_path, 0, monkeypatch)
    (tmp_path / "gpu-plugin-e2e").mkdir()
    return tmp_path / "gpu-plugin-e2e"


def save(directory, status, monkeypatch):
    """Have podman end with this status when it saves an image."""
    program = directory / "podman"
    program.write_text(PODMAN % status)
    program.chmod(0o755)
    monkeypatch.setattr(image_build, "podman", lambda storage: [str(program)])


def last_used(path, hours):
    then = time.time() - hours * HOUR
    os.utime(path, (then, then))


def archives(cache, hours, count):
    """Archives of other states of the sources, and the hours since their last use."""
    made = [cache / f"image-{hours}{number:015x}.tar" for number in range(count)]
    for path in made:
        path.write_text("image")
        last_used(path, hours)
    return made


def test_archives_of_other_checkouts_stay_for_a_day_after_their_last_use(cache):
    recent, old = archives(cache, 20, 30), archives(cache, 30, 3)
    made = image_build.install(lambda step: None)
    assert {*recent, made} == set(cache.glob("image-*"))
    assert not any(path.exists() for path in old)


def test_a_test_that_finds_an_archive_keeps_it(cache):
    name = "localhost/gpu-plugin-test/gpu-plugin:8"
    found = image_build.install(lambda step: None, name)
    last_used(found, 30)
    assert image_build.find(name) == found
    image_build.install(lambda step: None)
    assert found.exists()
    last_used(found, 30)
    image_build.install(lambda step: None)
    with pytest.raises(MissingError, match="gpu-plugin:8"):
        image_build.find(name)
    assert not found.exists()


def test_a_build_that_fails_is_one_missing_thing_and_leaves_no_file(cache, monkeypatch):
    save(cache.parent, 1, monkeypatch)
    with pytest.raises(MissingError, match="gpu-plugin-test/gpu-plugin:1"):
        image_build.install(lambda step: None)
    assert [path.name for path in cache.iterdir()] == ["image.lock"]
    save(cache.parent, 0, monkeypatch)
    assert image_build.install(lambda step: None).read_text() == "image\n"
