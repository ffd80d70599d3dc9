"""Changes of a watched file in every way, with inotify and by polling."""

import errno
import os
import shutil
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from asyncinotify import Inotify

from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon import config_source, watched_file
from gpu_plugin.daemon.config_source import ConfigSource
from gpu_plugin.daemon.watched_file import ABSENT, MAX_BYTES, FileWatcher, fingerprint
from gpu_plugin.runtime import inotify
from tests.unit.daemon.config_map import ConfigMapVolume, Listener
from tests.unit.waiting import until


def warnings_of_inotify(caplog):
    return [
        each for each in caplog.records if each.name == "gpu_plugin.runtime.inotify" and each.levelname == "WARNING"
    ]


@pytest.fixture(params=["told", "looking"])
def net(request, monkeypatch):
    """Detect changes by inotify alone, or by polling alone because inotify is exhausted."""
    if request.param == "told":
        monkeypatch.setattr(watched_file, "POLL_INTERVAL", 3600)
    else:
        monkeypatch.setattr(watched_file, "POLL_INTERVAL", 0.02)
        monkeypatch.setattr(inotify, "Inotify", exhausted)
    return request.param


def exhausted(*_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def source_of(path, listener):
    source = ConfigSource(resolve({"config_file": str(path)}, {}))
    source.changed = listener
    return source


@asynccontextmanager
async def watching(path):
    """Watch a file, and give the listener after its first call, for the present content."""
    listener = Listener()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source_of(path, listener).run)
        await listener.called(1)
        yield listener
        tasks.cancel_scope.cancel()


def rename_over(path):
    new = path.with_name("new.yaml")
    new.write_text("version: v2")
    new.replace(path)


def rewrite_at_the_same_size_and_time(path):
    there = path.stat()
    path.write_text("version: v9")
    os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns))


def become_a_directory(path):
    path.unlink()
    path.mkdir()


CHANGES = {
    "written again": lambda path: path.write_text("version: v2"),
    "renamed over": rename_over,
    "written again at the same size and time": rewrite_at_the_same_size_and_time,
    "removed": Path.unlink,
    "removed with its directory": lambda path: shutil.rmtree(path.parent),
    "moved away with its directory": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
    "made a directory": become_a_directory,
    "made a dangling link": lambda path: link_over(path, "nowhere"),
    "made a link to itself": lambda path: link_over(path, path.name),
}


def link_over(path, target):
    link = path.with_name("link")
    link.symlink_to(target)
    link.replace(path)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_change_is_reported_and_so_is_the_way_back(tmp_path, net, change):
    path = tmp_path / "etc" / "config.yaml"
    path.parent.mkdir()
    path.write_text("version: v1")
    async with watching(path) as listener:
        change(path)
        await listener.called(2)
        shutil.rmtree(path.parent, ignore_errors=True)
        await listener.until(lambda: fingerprint(path) == ABSENT)
        path.parent.mkdir()
        before = listener.calls
        path.write_text("version: v3")
        await listener.until(lambda: listener.calls > before)


async def test_a_file_that_does_not_exist_yet_is_waited_for_down_all_its_directories(tmp_path, net):
    path = tmp_path / "a" / "b" / "c" / "config.yaml"
    async with watching(path) as listener:
        path.parent.mkdir(parents=True)
        path.write_text("version: v1")
        await listener.called(2)


async def test_a_config_map_s_swap_is_reported(tmp_path, net):
    volume = ConfigMapVolume(tmp_path / "config")
    volume.write(config_yaml="version: v1")
    async with watching(tmp_path / "config" / "config.yaml") as listener:
        for calls in (2, 3, 4):
            volume.write(config_yaml=f"version: {calls}")
            await listener.called(calls)
        volume.write(another_yaml="version: v1")
        await listener.called(5)
        volume.write(config_yaml="version: v1")
        await listener.called(6)


async def test_a_file_behind_several_links_is_followed(tmp_path, net):
    (tmp_path / "real" / "one").mkdir(parents=True)
    (tmp_path / "real" / "two").mkdir()
    for name in ("one", "two"):
        (tmp_path / "real" / name / "config.yaml").write_text(name)
    (tmp_path / "current").symlink_to("real/one")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.yaml").symlink_to("../current/./config.yaml")
    async with watching(tmp_path / "sub" / "config.yaml") as listener:
        (tmp_path / "next").symlink_to(tmp_path / "real" / "two")
        (tmp_path / "next").rename(tmp_path / "current")
        await listener.called(2)
        (tmp_path / "real" / "two" / "config.yaml").write_text("three")
        await listener.called(3)


async def test_a_dangling_link_is_followed_to_where_its_end_appears(tmp_path, net):
    path = tmp_path / "config.yaml"
    path.symlink_to(tmp_path / "far" / "away.yaml")
    async with watching(path) as listener:
        (tmp_path / "far").mkdir()
        (tmp_path / "far" / "away.yaml").write_text("version: v1")
        await listener.called(2)


async def test_equal_content_is_no_change(tmp_path, net):
    path = tmp_path / "config.yaml"
    path.write_text("version: v1")
    volume = ConfigMapVolume(tmp_path / "config")
    volume.write(config_yaml="version: v1")
    async with watching(path) as listener, watching(tmp_path / "config" / "config.yaml") as of_the_volume:
        path.write_text("version: v1")
        path.chmod(0o600)
        rename = tmp_path / "same"
        rename.write_text("version: v1")
        rename.replace(path)
        volume.write(config_yaml="version: v1")
        await anyio.sleep(0.6)
        path.write_text("version: v2")
        await listener.called(2)
        volume.write(config_yaml="version: v2")
        await of_the_volume.called(2)


async def test_a_burst_is_one_change(tmp_path, monkeypatch):
    monkeypatch.setattr(watched_file, "POLL_INTERVAL", 3600)
    monkeypatch.setattr(watched_file, "SETTLE", 0.3)
    monkeypatch.setattr(watched_file, "LONGEST_SETTLE", 30)
    path = tmp_path / "config.yaml"
    async with watching(path) as listener:
        for count in range(20):
            path.write_text(str(count))
        await listener.called(2)


async def test_a_storm_is_followed_and_settles_on_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(watched_file, "SETTLE", 0.02)
    monkeypatch.setattr(watched_file, "LONGEST_SETTLE", 0.1)
    path = tmp_path / "config.yaml"
    path.write_text("first")
    read = []

    class Reading(Listener):
        def set(self):
            read.append((time.monotonic(), path.read_text()))
            super().set()

    listener = Reading()
    over = threading.Event()

    def storm():
        for count in range(5000):
            if count >= 100 and listener.calls >= 3:
                break
            temporary = path.with_suffix(".new")
            temporary.write_text(f"write {count}")
            temporary.replace(path)
            over.wait(0.003)
        path.write_text("the last")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source_of(path, listener).run)
        await listener.called(1)
        began = time.monotonic()
        await anyio.to_thread.run_sync(storm)
        lasted = time.monotonic() - began
        await listener.until(lambda: read[-1][1] == "the last")
        tasks.cancel_scope.cancel()
    assert 4 <= len(read) <= 5 + lasted / watched_file.SETTLE  # followed while it lasted, and not each write


async def test_inotify_that_runs_out_is_said_once_and_used_once_there_is_more(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watched_file, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(inotify, "Inotify", exhausted)
    path = tmp_path / "config.yaml"
    async with watching(path) as listener:
        path.write_text("version: v1")
        await listener.called(2)
        monkeypatch.setattr(inotify, "Inotify", Inotify)
        path.write_text("version: v2")
        await listener.called(3)
        await anyio.sleep(0.1)
        monkeypatch.setattr(watched_file, "POLL_INTERVAL", 3600)
        path.write_text("version: v3")
        await listener.called(4)
    assert len(warnings_of_inotify(caplog)) == 1
    assert "max_user_instances" in caplog.text


class Small(Inotify):
    """Watches two directories at most."""

    def add_watch(self, path, mask):
        if len(self.watches) >= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().add_watch(path, mask)


class Refusing(Inotify):
    """Lacks the rights to watch the last two directories."""

    def add_watch(self, path, mask):
        if Path(path).name.startswith("test_") or Path(path).name == "a":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return super().add_watch(path, mask)


@pytest.mark.parametrize(("kind", "why"), [(Small, "No space left on device"), (Refusing, "/a: Permission denied")])
async def test_a_directory_that_cannot_be_watched_is_said_once_and_read_at_intervals(
    tmp_path, monkeypatch, caplog, kind, why
):
    monkeypatch.setattr(watched_file, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(inotify, "Inotify", kind)
    path = tmp_path / "a" / "config.yaml"
    path.parent.mkdir()
    async with watching(path) as listener:
        for calls in (2, 3):
            path.write_text(f"version: v{calls}")
            await listener.called(calls)
    assert len(warnings_of_inotify(caplog)) == 1
    assert why in caplog.text


async def test_what_happens_before_a_place_is_watched_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(watched_file, "POLL_INTERVAL", 3600)
    path = tmp_path / "config.yaml"
    path.write_text("version: v1")
    real = inotify.Directories.arm

    def late(self, places):
        if not path.read_text().endswith("v2"):
            path.write_text("version: v2")
        return real(self, places)

    monkeypatch.setattr(inotify.Directories, "arm", late)
    received: list[str] = []
    watcher = FileWatcher(lambda: (path.read_text(), inotify.route(path)), received.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watcher.run)
        await until(lambda: received)
        tasks.cancel_scope.cancel()
    assert received == ["version: v2"]


async def test_places_that_matter_no_more_are_watched_no_more(tmp_path, monkeypatch):
    made = []

    class Kept(Inotify):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(inotify, "Inotify", Kept)
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.yaml").write_text("version: 0")
    path = tmp_path / "config.yaml"
    path.symlink_to("old/config.yaml")
    async with watching(path) as listener:
        before = len(made[0].watches)
        for calls in range(2, 5):
            new = tmp_path / f"version-{calls}"
            new.mkdir()
            (new / "config.yaml").write_text(f"version: {calls}")
            (tmp_path / "link").symlink_to(f"version-{calls}/config.yaml")
            (tmp_path / "link").rename(path)
            await listener.called(calls)
        await until(lambda: len(made[0].watches) == before)
        assert len(made) == 1


async def test_a_file_system_that_hangs_is_said_once_and_holds_up_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watched_file, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(watched_file, "PATIENCE", 0.05)
    dead = threading.Event()
    real = watched_file.fingerprint

    def hang(path):
        if not dead.is_set():
            dead.wait(30)
        return real(path)

    path = tmp_path / "config.yaml"
    path.write_text("version: v1")
    monkeypatch.setattr(config_source, "fingerprint", hang)
    listener = Listener()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source_of(path, listener).run)
        await until(lambda: "does not answer" in caplog.text)
        await anyio.sleep(0.2)
        dead.set()
        await listener.called(1)
        tasks.cancel_scope.cancel()
    assert caplog.text.count("does not answer") == 1


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_it_ends_at_once_and_leaves_nothing_open(tmp_path):
    before = open_files()
    for _ in range(5):
        async with watching(tmp_path / "config.yaml"):
            pass
    assert open_files() == before
    await until(lambda: not any(thread.name == "configuration-files" for thread in threading.enumerate()))


def test_fingerprints_tell_contents_apart(tmp_path):
    path = tmp_path / "config.yaml"
    seen = [fingerprint(path)]
    for content in (b"", b"a", b"b", b"c" * 100_000, b"c" * 100_001, b"d" * MAX_BYTES, b"d" * (MAX_BYTES + 1)):
        path.write_bytes(content)
        seen.append(fingerprint(path))
    path.unlink()
    os.mkfifo(path)
    seen.append(fingerprint(path))
    path.unlink()
    path.mkdir()
    seen.append(fingerprint(path))
    path.rmdir()
    path.symlink_to(path.name)
    seen.append(fingerprint(path))
    assert len(set(seen)) == len(seen)
    path.unlink()
    path.write_bytes(b"a")
    assert fingerprint(path) == seen[2]
