"""Each change of the device plugin directory, of its path and of its files is noticed at once."""

import os
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from asyncinotify import Event, Inotify, Mask

from gpu_plugin.kubelet import directory as directory_module
from gpu_plugin.kubelet.directory import POLL_INTERVAL, watch
from gpu_plugin.runtime.pulse import Pulse

SOON = 2.0
assert SOON < POLL_INTERVAL, "what is heard by looking now and then would pass for an event"


class Heard:
    def __init__(self) -> None:
        self.pulse = Pulse()
        self.times = 0
        original = self.pulse.ring

        def ring() -> None:
            self.times += 1
            original()

        self.pulse.ring = ring  # type: ignore[method-assign]

    async def after(self, change) -> None:
        """Make a change, and wait until it is noticed."""
        while True:  # earlier events are over
            before = self.times
            await anyio.sleep(0.05)
            if self.times == before:
                break
        change()
        with anyio.fail_after(SOON):
            while self.times == before:
                await self.pulse.wait()


@asynccontextmanager
async def watching(path: Path):
    heard = Heard()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, path, heard.pulse)
        with anyio.fail_after(SOON):
            while not heard.times:
                await heard.pulse.wait()
        yield heard
        tasks.cancel_scope.cancel()


@pytest.fixture
def plugins(directory):
    """A directory as the kubelet's: three deep."""
    path = directory / "lib" / "kubelet" / "device-plugins"
    path.mkdir(parents=True)
    return path


async def test_what_comes_into_it_by_any_way_is_heard(plugins, directory):
    (directory / "elsewhere").touch()
    async with watching(plugins) as heard:
        await heard.after((plugins / "kubelet.sock").touch)
        await heard.after((plugins / "kubelet.sock").unlink)
        await heard.after(lambda: (directory / "elsewhere").rename(plugins / "kubelet.sock"))
        await heard.after(lambda: (plugins / "kubelet.sock").rename(directory / "elsewhere"))


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_directory_on_the_way_that_is_renamed_and_made_anew_is_followed(plugins, depth):
    moved = [plugins, *plugins.parents][depth]
    async with watching(plugins) as heard:
        await heard.after(lambda: moved.rename(moved.with_name("old")))
        await heard.after(lambda: plugins.mkdir(parents=True))
        await heard.after((plugins / "kubelet.sock").touch)


async def test_a_link_that_is_pointed_elsewhere_is_followed(plugins, directory):
    other, link, fresh = directory / "other", directory / "link", directory / "fresh"
    (other / "device-plugins").mkdir(parents=True)
    link.symlink_to(plugins.parent)
    async with watching(link / "device-plugins") as heard:
        fresh.symlink_to(other)
        await heard.after(lambda: fresh.rename(link))
        await heard.after((other / "device-plugins" / "kubelet.sock").touch)


async def test_what_happens_beside_the_way_is_nothing(plugins, directory):
    async with watching(plugins) as heard:
        await anyio.sleep(0.1)
        before = heard.times
        (directory / "neighbour").touch()
        (plugins.parent / "cpu_manager_state").touch()
        await anyio.sleep(0.1)
        assert heard.times == before


async def test_an_overflow_is_a_reason_to_look_and_what_comes_after_it_is_heard(plugins, monkeypatch):
    told, original = anyio.Event(), Inotify.get

    async def overflowing(self):
        if told.is_set() and not overflowed:
            overflowed.append(self)
            return Event(None, Mask.Q_OVERFLOW, 0, None)
        return await original(self)

    overflowed: list[Inotify] = []
    monkeypatch.setattr(Inotify, "get", overflowing)
    async with watching(plugins) as heard:
        before = heard.times
        told.set()
        (plugins.parent / "cpu_manager_state").touch()  # beside the way
        with anyio.fail_after(SOON):
            while heard.times == before:
                await heard.pulse.wait()
        assert overflowed
        await heard.after((plugins / "kubelet.sock").touch)


async def test_a_directory_on_the_way_that_may_not_be_read_is_no_matter(plugins, monkeypatch):
    original = Inotify.add_watch

    def add_watch(self, path, mask):
        if path == str(plugins.parent.parent):
            raise PermissionError(13, "Permission denied", path)
        return original(self, path, mask)

    monkeypatch.setattr(Inotify, "add_watch", add_watch)
    async with watching(plugins) as heard:
        await heard.after((plugins / "kubelet.sock").touch)


async def test_a_directory_that_may_not_be_read_itself_is_said_once_and_looked_at_now_and_then(
    plugins, monkeypatch, caplog
):
    """As SELinux refuses the right to watch it, which no limit is the cause of."""
    original = Inotify.add_watch

    def add_watch(self, path, mask):
        if path == str(plugins):
            raise PermissionError(13, "Permission denied", path)
        return original(self, path, mask)

    monkeypatch.setattr(directory_module, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(Inotify, "add_watch", add_watch)
    async with watching(plugins) as heard:
        with anyio.fail_after(SOON):
            while heard.times < 3:
                await heard.pulse.wait()
    assert caplog.text.count(f"{plugins}: Permission denied") == 1
    assert "max_user_watches" not in caplog.text


async def test_where_nothing_can_be_watched_one_looks_now_and_then(plugins, monkeypatch, caplog):
    monkeypatch.setattr(directory_module, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(Inotify, "add_watch", lambda *_: (_ for _ in ()).throw(OSError(28, "no watches left")))
    async with watching(plugins) as heard:
        with anyio.fail_after(SOON):
            while heard.times < 3:
                await heard.pulse.wait()
    assert "no watches left" in caplog.text


async def test_a_directory_that_was_removed_under_its_mount_is_said_once(plugins, monkeypatch, caplog):
    monkeypatch.setattr(directory_module, "POLL_INTERVAL", 0.02)
    held = os.open(plugins, os.O_PATH)
    try:
        async with watching(Path(f"/proc/self/fd/{held}")) as heard:
            assert "was removed" not in caplog.text
            plugins.rmdir()
            with anyio.fail_after(SOON):
                while "was removed on the host" not in caplog.text:
                    await heard.pulse.wait()
            for _ in range(3):
                await heard.pulse.wait()
    finally:
        os.close(held)
    assert caplog.text.count("was removed on the host") == 1
