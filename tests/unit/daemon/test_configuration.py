import asyncio
import logging
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.config.errors import ConfigError, Fault
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon import configuration as module
from gpu_plugin.daemon.config_source import ConfigSource
from gpu_plugin.daemon.configuration import Configuration, Wait, begin_with
from gpu_plugin.daemon.list_strategy import ListStrategy
from gpu_plugin.runtime.signals import Signals
from tests.unit.waiting import until

BASE = resolve({}, {})


class Wanted:
    """The result of the next read of the configuration, and the paths of all reads."""

    def __init__(self, settings):
        self.settings = settings
        self.paths = []

    def __call__(self, path):
        self.paths.append(path)
        if isinstance(self.settings, Exception):
            raise self.settings
        return self.settings


class User:
    """Applies settings, or refuses them."""

    def __init__(self, refusal=None):
        self.taken: list[Settings] = []
        self.refusal = refusal

    def apply_settings(self, new):
        if self.refusal is not None:
            raise self.refusal
        self.taken.append(new)


@asynccontextmanager
async def following(configuration, refusal=None):
    user = User(refusal)

    async def follow():
        while True:
            await configuration.update(user)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(configuration.watch)
        tasks.start_soon(follow)
        yield user.taken
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def running(wanted, unchangeable=(), refusal=None):
    configuration = Configuration(BASE, ConfigSource(BASE), wanted, unchangeable)
    async with following(configuration, refusal) as taken:
        yield configuration, taken


async def counted(configuration, **counts):
    await until(lambda: counts.items() <= configuration.status().reloads.items())


async def reads(configuration, **counts):
    configuration.request_read()
    await counted(configuration, **counts)


async def test_newer_settings_are_taken_and_in_force_and_said(caplog):
    caplog.set_level(logging.INFO)
    new = replace(BASE, mig_strategy="mixed")
    async with running(Wanted(new)) as (configuration, taken):
        await reads(configuration, applied=1)
        assert taken == [new]
        assert configuration.settings is new
    assert "configuration: no file: flags.migStrategy: mixed" in caplog.text


async def test_the_same_settings_are_taken_by_nobody_and_what_is_remarked_about_them_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    wanted = Wanted(replace(BASE))
    async with running(wanted) as (configuration, taken):
        await reads(configuration, unchanged=1)
        wanted.settings = replace(BASE, remarks=(Fault("does no harm", "config.yaml", 3),))
        for times in (2, 3):
            await reads(configuration, unchanged=times)
        assert taken == []
    assert caplog.text.count("configuration: config.yaml:3: does no harm") == 1


@pytest.mark.parametrize("error", [ConfigError("config.yaml:3: no"), ZeroDivisionError("odd")])
async def test_what_cannot_be_read_is_said_once_and_the_last_good_one_stays(error, caplog):
    wanted = Wanted(error)
    async with running(wanted) as (configuration, taken):
        for times in range(1, 4):
            await reads(configuration, refused=times)
        assert configuration.settings is BASE
        assert configuration.status().refused == str(error)
        assert caplog.text.count(f"nothing is changed: {error}") == 1
        wanted.settings = replace(BASE, mig_strategy="single")
        await reads(configuration, applied=1)
        assert configuration.status().refused == ""
        assert len(taken) == 1


@pytest.mark.parametrize(("refusal", "is_whole"), [(ConfigError("no"), True), (ZeroDivisionError("odd"), False)])
async def test_a_failure_while_settings_are_applied_is_not_logged_as_no_change(refusal, is_whole, caplog):
    wanted = Wanted(replace(BASE, mig_strategy="single"))
    async with running(wanted, refusal=refusal) as (configuration, _):
        await reads(configuration, refused=1)
        assert configuration.settings is BASE
        assert ("nothing is changed" in caplog.text) is is_whole


async def test_all_that_is_wrong_with_a_file_is_logged_and_told_a_line_each(caplog):
    faults = [Fault(f"{number} is not one of them", "c.yaml", number, "flags.migStrategy") for number in range(1, 4)]
    wanted = Wanted(ConfigError.of(faults))
    async with running(wanted) as (configuration, _):
        for times in (1, 2):
            await reads(configuration, refused=times)
        assert [message.partition("changed: ")[2] for message in caplog.messages] == [*map(str, faults)]
        assert configuration.status().faults == tuple(map(str, faults))
        wanted.settings = ConfigError.of([*faults[:2], faults[2]._replace(reason="is another")])
        await reads(configuration, refused=3)
        assert configuration.status().faults[-1].endswith("is another")
        wanted.settings = ConfigError.of([Fault(str(number)) for number in range(1000)])
        await reads(configuration, refused=4)
        assert configuration.status().faults[-2:] == ("49", "and 950 more")
        wanted.settings = BASE
        await reads(configuration, unchanged=1)
        assert configuration.status().faults == ()


async def test_what_takes_a_restart_is_refused(caplog):
    new = replace(BASE, state_dir="/elsewhere", driver_root="/run/nvidia/driver", mig_strategy="mixed")
    async with running(Wanted(new), ("state_dir", "driver_root", "dev_root")) as (configuration, taken):
        await reads(configuration, refused=1)
    said = (
        "the configuration: --state-dir, --driver-root cannot change while the process runs, so no part of the new "
        "configuration is in force (flags.stateDir from '/var/lib/gpu-plugin' to '/elsewhere', "
        "flags.nvidiaDriverRoot from '/' to '/run/nvidia/driver')"
    )
    assert said in caplog.text
    assert taken == []


async def test_many_wishes_at_once_are_one_more_reading():
    wanted = Wanted(replace(BASE))
    async with running(wanted) as (configuration, _):
        for _ in range(100):
            configuration.request_read()
        await counted(configuration, unchanged=1)
    assert len(wanted.paths) == 1


async def test_a_reading_that_is_interrupted_is_made_again_by_the_next_daemon_of_the_process():
    new = replace(BASE, mig_strategy="mixed")
    reading, goes_on = anyio.Event(), anyio.Event()

    class Slow(ListStrategy):
        async def settled(self, settings):
            reading.set()
            await goes_on.wait()
            return settings

    configuration = Configuration(BASE, ConfigSource(BASE), Wanted(new), (), Slow())
    async with following(configuration) as taken:
        configuration.request_read()
        await reading.wait()
    assert taken == []
    goes_on.set()
    async with following(configuration) as taken:
        await counted(configuration, applied=1)
        assert taken == [new]


async def test_without_a_label_to_choose_by_one_begins_as_told():
    settings, _ = await begin_with(BASE, Wanted(ZeroDivisionError()), Signals())
    assert settings is BASE


class Chosen:
    """Replaces `ConfigSource`. The test sets when the file is known."""

    made: "Chosen"

    def __init__(self, _):
        Chosen.made = self
        self.known, self.again, self.changed = anyio.Event(), anyio.Event(), asyncio.Event()
        self.unknown, self.complaint, self.watch_trouble = "waiting for the label", "", ""

    def selected(self):
        return "/config/default"

    def wanted(self):
        return self.selected()

    def look_again(self):
        self.known.set()
        self.changed.set()

    def keep(self, file):
        self.kept = file

    async def wait_selected(self):
        await self.known.wait()

    async def run(self):
        await self.again.wait()
        self.changed.set()
        await anyio.sleep_forever()


@pytest.fixture
def by_label(monkeypatch):
    monkeypatch.setattr(module, "ConfigSource", Chosen)
    return replace(BASE, config_file_srcdir="/config", node_name="node")


@asynccontextmanager
async def beginning(settings, wanted, wait=None):
    """Run `begin_with`, and give a list that gets its result."""
    begun: list[object] = []

    async def begin():
        begun.append(await begin_with(settings, wanted, Signals(), wait))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(begin)
            await anyio.wait_all_tasks_blocked()
            yield begun


async def test_the_daemon_begins_with_the_file_that_the_label_names(by_label):
    wanted = Wanted(replace(by_label, mig_strategy="mixed"))
    async with beginning(by_label, wanted) as begun:
        assert wanted.paths == []
        Chosen.made.known.set()
    assert begun == [(wanted.settings, Chosen.made)]  # the source of the choice is kept with its state
    assert wanted.paths == ["/config/default"]


async def test_the_daemon_waits_for_a_valid_file(by_label, caplog):
    wanted = Wanted(ConfigError("default:1: no"))
    async with beginning(by_label, wanted) as begun:
        Chosen.made.known.set()
        await until(lambda: "default:1: no" in caplog.text)
        assert begun == []
        wanted.settings = by_label
        Chosen.made.again.set()
    assert begun == [(by_label, Chosen.made)]


async def test_the_wait_has_its_reason(by_label, monkeypatch):
    monkeypatch.setattr(module, "CHOSEN_WITHIN", 0.02)
    wanted, wait = Wanted(ConfigError("default:1: no")), Wait()
    assert (wait.why, wait.tried) == ("the configuration is being read", False)
    async with beginning(by_label, wanted, wait):
        await until(lambda: wait.source)
        assert wait.why == Chosen.made.unknown
        await until(lambda: wait.tried)
        assert wait.why == Chosen.made.unknown
        Chosen.made.unknown, Chosen.made.complaint = "", "the label names no file"
        Chosen.made.known.set()
        await until(lambda: "default" in wait.why)
        assert wait.why == "default:1: no; the label names no file"
        wanted.settings = by_label
        Chosen.made.again.set()


async def test_a_directory_that_cannot_be_read_counts_as_an_attempt(by_label, monkeypatch, caplog):
    monkeypatch.setattr(module, "CHOSEN_WITHIN", 0.3)
    wait = Wait()
    async with beginning(by_label, Wanted(by_label), wait):
        Chosen.made.unknown = ""
        await until(lambda: wait.tried)
        assert wait.why == "/config could not be read within 0.3 s"
        assert wait.why in caplog.text
        Chosen.made.known.set()


async def test_sighup_reads_everything_again_during_the_wait(by_label):
    async with beginning(by_label, Wanted(by_label)) as begun:
        os.kill(os.getpid(), signal.SIGHUP)
    assert begun == [(by_label, Chosen.made)]


async def test_what_is_wrong_with_the_label_is_told_as_long_as_nothing_else_is(by_label):
    source = Chosen(None)
    wanted = Wanted(ConfigError("h100:1: no"))
    configuration = Configuration(BASE, source, wanted, ())  # type: ignore[arg-type]
    assert (configuration.status().refused, configuration.status().unheard) == ("", "")
    source.complaint, source.watch_trouble = "the label names no file", "changes of the label are not heard"
    assert configuration.status().refused == "the label names no file"
    assert configuration.status().unheard == "changes of the label are not heard"
    async with following(configuration):
        await reads(configuration, refused=1)
        assert configuration.status().refused == "h100:1: no"


async def test_every_setting_in_force_is_told_in_full_unless_it_is_too_much(monkeypatch):
    configuration = Configuration(replace(BASE, mig_strategy="mixed"), ConfigSource(BASE), Wanted(BASE), ())
    assert resolve({}, {}, configuration.in_full()) == configuration.settings
    monkeypatch.setattr(module, "LONGEST_IN_FULL", 100)
    [(name, size)] = configuration.in_full().items()
    assert name == "left_out_bytes"
    assert isinstance(size, int)
    assert size > 100


async def test_the_file_in_force_is_told_and_beside_it_the_one_that_is_wanted(tmp_path):
    file = tmp_path / "config.yaml"
    source = ConfigSource(resolve({"config_file": str(file)}, {}))
    wanted = Wanted(replace(BASE, mig_strategy="mixed"))
    configuration = Configuration(BASE, source, wanted, ())
    status = configuration.status()
    assert (status.file, status.wanted) == (str(file), "")
    source._selected = other = tmp_path / "another"  # like a changed label
    assert (configuration.status().file, configuration.status().wanted) == (str(file), str(other))
    async with following(configuration):
        wanted.settings, good = ConfigError("another:1: no"), wanted.settings  # the watch requests the first read
        await counted(configuration, refused=1)
        assert (configuration.status().file, configuration.status().wanted) == (str(file), str(other))
        wanted.settings = good
        await reads(configuration, applied=1)
        assert (configuration.status().file, configuration.status().wanted) == (str(other), "")


class Keeping(ConfigSource):
    """A source that stores its choice if `works` is true."""

    def __init__(self):
        super().__init__(BASE)
        self.kept = []
        self.works = True

    def keep(self, file):
        self.kept.append(file)
        return self.works


async def test_the_file_in_force_is_remembered_after_each_reading_and_again_until_it_is(monkeypatch):
    monkeypatch.setattr(module, "RETRY", 0.01)
    source = Keeping()
    wanted = Wanted(replace(BASE, mig_strategy="mixed"))
    configuration = Configuration(BASE, source, wanted, ())
    async with following(configuration):
        await until(lambda: source.kept)
        assert configuration.storage_trouble == ""
        source.works = False
        source._selected = Path("/etc/exclusive")
        configuration.request_read()
        await until(lambda: source.kept.count(Path("/etc/exclusive")) >= 3)
        assert "it would be lost at a restart" in configuration.storage_trouble
        source.works = True
        await until(lambda: not configuration.storage_trouble)
    assert set(source.kept) == {None, Path("/etc/exclusive")}


async def test_the_file_in_force_is_remembered_once_after_a_reading_and_when_told_to_look():
    source = Keeping()
    configuration = Configuration(BASE, source, Wanted(replace(BASE, mig_strategy="mixed")), ())

    async def kept(times):
        await until(lambda: not (len(source.kept) < times or configuration._saving.begun))
        await anyio.wait_all_tasks_blocked()
        assert len(source.kept) == times

    async with following(configuration):
        await kept(1)
        await reads(configuration, applied=1)
        await kept(2)
        configuration.check_stored_choice()
        await kept(3)
