"""The files in the directory that runtimes read, with obstacles of every kind."""

import errno
import fcntl
import json
import os
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_plugin.containers.cdi.spec import to_json
from gpu_plugin.containers.cdi_files import directory as directory_module
from gpu_plugin.containers.cdi_files.directory import RECORD, SpecDirectory
from tests.revision import revision
from tests.unit.containers.cdi_files.specs import GPU_FILE, IMEX_FILE, spec

ONE = {GPU_FILE: spec(GPU_a=("/dev/nvidia0",))}
TWO = {GPU_FILE: spec(GPU_b=("/dev/nvidia1",))}
CHANNEL = {IMEX_FILE: spec("imex-channel", _0=("/dev/nvidia-caps-imex-channels/channel0",))}


@pytest.fixture
def directory(tmp_path):
    return SpecDirectory(tmp_path / "run" / "cdi")


def record(directory):
    return directory.path / RECORD


def listed(directory):
    """The names of all files but the record."""
    return sorted(path.name for path in directory.path.iterdir() if path.name != RECORD)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def refusal(directory, specs):
    """The only sentence about what could not be done."""
    outcome = directory.write(specs)
    [(_, sentence)] = outcome.refused.items()
    return sentence


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_directory_and_files_are_for_all_to_read_whatever_the_umask_is(directory, umask):
    before = os.umask(umask)
    try:
        outcome = directory.write(ONE | CHANNEL)
    finally:
        os.umask(before)
    assert (set(outcome.changed), dict(outcome.refused)) == ({GPU_FILE, IMEX_FILE}, {})
    assert mode(directory.path) == 0o755
    assert {mode(directory.path / name) for name in listed(directory)} == {0o644}
    assert directory.read(GPU_FILE) == ONE[GPU_FILE]


def test_a_directory_that_is_there_keeps_its_mode(directory):
    directory.path.mkdir(parents=True, mode=0o700)
    directory.write(ONE)
    assert mode(directory.path) == 0o700


def test_the_same_again_is_not_written_by_this_process_or_the_next(directory, monkeypatch):
    directory.write(ONE)
    before = revision(directory.path / GPU_FILE)
    assert directory.write(dict(ONE)).changed == ()
    assert SpecDirectory(directory.path).write(ONE).changed == ()
    assert revision(directory.path / GPU_FILE) == before
    touched = []
    for call in ("replace_file", "leftovers"):
        monkeypatch.setattr(directory_module, call, lambda *_, call=call: touched.append(call))
    directory.write(dict(ONE))
    assert touched == []


def other_content(file):
    file.write_text("{}")


def same_size(file):
    file.write_bytes(file.read_bytes().replace(b"GPU-a", b"GPU-x"))


def other_mode(file):
    file.chmod(0o600)


def link(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def directory_there(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("change", [Path.unlink, other_content, same_size, other_mode, link, pipe])
def test_what_somebody_else_did_to_our_file_is_mended(directory, change):
    directory.write(ONE)
    content = (directory.path / GPU_FILE).read_bytes()
    change(directory.path / GPU_FILE)
    assert directory.write(ONE).changed == (GPU_FILE,)
    assert (directory.path / GPU_FILE).read_bytes() == content
    assert mode(directory.path / GPU_FILE) == 0o644
    assert not (directory.path / GPU_FILE).is_symlink()


def test_files_of_ours_that_are_not_wanted_any_more_go_and_foreign_ones_are_never_touched(directory):
    directory.write(ONE | CHANNEL)
    foreign = ["nvidia.yaml", "k8s.device-plugin.nvidia.com-gpu.yaml", "vendor.json", ".hidden", f".{GPU_FILE}.sw"]
    for name in foreign:
        (directory.path / name).write_text("theirs")
    assert directory.write(TWO).changed == (GPU_FILE, IMEX_FILE)
    assert listed(directory) == sorted([*foreign, GPU_FILE])
    assert directory.remove().changed == (GPU_FILE,)
    assert listed(directory) == sorted(foreign)
    assert all((directory.path / name).read_text() == "theirs" for name in foreign)


GO_JSON = json.dumps(json.loads(to_json(ONE[GPU_FILE])), separators=(",", ":")).encode() + b"\n"
OLDER_PLUGIN = (
    b'{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":'
    b'[{"path":"/dev/nvidia0"}],"hooks":[{"hookName":"createContainer","path":"/usr/bin/nvidia-cdi-hook"}]}}],'
    b'"containerEdits":{"env":["NVIDIA_VISIBLE_DEVICES=void"]}}'
)


@pytest.mark.parametrize("content", [GO_JSON, OLDER_PLUGIN, to_json(ONE[GPU_FILE]) + b" ", b"cdiVersion: 0.5.0", b""])
def test_a_file_of_our_name_that_another_program_wrote_stays(directory, content):
    directory.write(ONE | CHANNEL)
    file = directory.path / GPU_FILE
    file.write_bytes(content)
    assert directory.write(CHANNEL).foreign == (GPU_FILE,)
    outcome = SpecDirectory(directory.path).remove()  # of another process
    assert (outcome.foreign, outcome.changed, outcome.refused) == ((GPU_FILE,), (IMEX_FILE,), {})
    assert file.read_bytes() == content
    assert directory.write(ONE).changed == (GPU_FILE,)  # but its place is ours
    assert SpecDirectory(directory.path).remove().changed == (GPU_FILE,)


@pytest.mark.parametrize("change", [link, pipe, directory_there])
def test_anything_but_a_regular_file_in_the_place_of_ours_stays(directory, change):
    directory.write(ONE | CHANNEL)
    change(directory.path / GPU_FILE)
    outcome = SpecDirectory(directory.path).remove()
    assert (outcome.foreign, outcome.changed, outcome.refused) == ((GPU_FILE,), (IMEX_FILE,), {})
    assert os.path.lexists(directory.path / GPU_FILE)


class Killed(BaseException):
    """Ends a write at one step, as the end of the process does."""


@pytest.mark.parametrize("step", range(1, 20))
def test_after_a_kill_at_any_step_the_next_process_removes_everything(directory, monkeypatch, step):
    directory.write(ONE)
    calls = iter(range(1, 100))

    def counted(name):
        call = getattr(os, name)

        def killed(*arguments, **options):
            if next(calls) >= step:
                raise Killed
            return call(*arguments, **options)

        return killed

    with monkeypatch.context() as patched:
        for name in ("fchmod", "rename", "replace", "unlink", "fsync"):
            patched.setattr(os, name, counted(name))
        with suppress(Killed):
            directory.write(TWO | CHANNEL)
    outcome = SpecDirectory(directory.path).remove()
    assert (outcome.foreign, outcome.refused) == ((), {})
    assert list(directory.path.iterdir()) == []


def no_text(file):
    file.write_bytes(b"\xff\0" * 100)


@pytest.mark.parametrize("damage", [Path.unlink, other_content, pipe, no_text])
def test_files_stay_without_a_record_until_the_next_write_restores_it(directory, damage):
    directory.write(ONE)
    damage(record(directory))
    assert SpecDirectory(directory.path).write({}).foreign == (GPU_FILE,)
    assert directory.write(ONE).refused == {}
    assert SpecDirectory(directory.path).remove().changed == (GPU_FILE,)
    assert list(directory.path.iterdir()) == []


def test_the_record_is_in_the_form_of_sha256sum_and_goes_with_the_last_file(directory):
    directory.write(ONE | CHANNEL)
    assert mode(record(directory)) == 0o644
    check = ["sha256sum", "--check", "--strict", "--quiet", record(directory).name]
    subprocess.run(check, cwd=directory.path, check=True)
    directory.write(TWO | CHANNEL)
    subprocess.run(check, cwd=directory.path, check=True)
    directory.write(CHANNEL)
    subprocess.run(check, cwd=directory.path, check=True)
    assert directory.write({}).changed == (IMEX_FILE,)
    assert list(directory.path.iterdir()) == []


def test_a_record_that_cannot_be_written_is_named_and_stops_no_file(directory):
    directory.path.mkdir(parents=True)
    record(directory).mkdir()
    outcome = directory.write(ONE)
    assert outcome.changed == (GPU_FILE,)
    (sentence,) = outcome.refused.values()
    assert sentence.startswith(f"{record(directory)}: Is a directory")
    record(directory).rmdir()
    assert directory.write(ONE).refused == {}
    assert SpecDirectory(directory.path).remove().changed == (GPU_FILE,)


def test_after_the_removal_nothing_is_written_any_more(directory):
    directory.write(ONE)
    directory.remove()
    assert directory.write(TWO).changed == ()
    assert list(directory.path.iterdir()) == []


def test_a_removal_goes_on_past_what_cannot_be_removed_and_the_next_one_removes_it(directory, monkeypatch):
    directory.write(ONE | CHANNEL)
    unlink = Path.unlink

    def refuse(path, **options):
        if path.name == GPU_FILE:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))  # such as an immutable file
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        outcome = directory.remove()
    assert outcome.changed == (IMEX_FILE,)
    assert outcome.refused == {GPU_FILE: f"{directory.path / GPU_FILE}: Operation not permitted"}
    assert SpecDirectory(directory.path).remove().changed == (GPU_FILE,)
    assert list(directory.path.iterdir()) == []


def test_what_another_process_is_writing_now_is_not_swept_and_is_later(directory):
    directory.path.mkdir(parents=True)
    half = directory.path / f".{GPU_FILE}.abcdefgh"
    half.write_text("{")
    other = os.open(directory.path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert directory.write(ONE).refused == {}
        assert half.exists()
    finally:
        os.close(other)
    directory.write(ONE)
    assert not half.exists()


def test_a_write_says_that_somebody_is_writing(directory, monkeypatch):
    directory.path.mkdir(parents=True)
    locked = set()

    def look(file, content, mode):
        other = os.open(file.parent, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked.add(file.name)
        finally:
            os.close(other)

    monkeypatch.setattr(directory_module, "replace_file", look)
    directory.write(ONE)
    assert locked == {GPU_FILE, RECORD}


def test_a_file_where_the_directory_should_be_is_named_and_heals(directory):
    directory.path.parent.mkdir()
    directory.path.write_text("")
    assert refusal(directory, ONE) == f"{directory.path}: Not a directory"
    directory.path.unlink()
    assert directory.write(ONE).changed == (GPU_FILE,)


def test_a_directory_where_the_file_should_be_is_named_and_the_other_files_are_written(directory):
    (directory.path / GPU_FILE).mkdir(parents=True)
    outcome = directory.write(ONE | CHANNEL)
    assert outcome.changed == (IMEX_FILE,)
    assert outcome.refused == {GPU_FILE: f"{directory.path / GPU_FILE}: Is a directory"}
    assert listed(directory) == sorted([GPU_FILE, IMEX_FILE])  # nothing half written lies there
    (directory.path / GPU_FILE).rmdir()
    assert directory.write(ONE | CHANNEL).changed == (GPU_FILE,)


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.fchmod", "pathlib.Path.replace"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_system_that_refuses_is_told_in_the_same_words_each_time_and_heals(directory, monkeypatch, call, number):
    directory.write(TWO)

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), "/a/name/of/the/moment")

    with monkeypatch.context() as patched:
        patched.setattr(call, refuse)
        told = {refusal(directory, ONE) for _ in range(3)}
    assert told == {f"{directory.path / GPU_FILE}: {os.strerror(number)}"}
    assert directory.read(GPU_FILE) == TWO[GPU_FILE]
    assert directory.write(ONE).changed == (GPU_FILE,)
    assert listed(directory) == [GPU_FILE]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"null", b"\xff", b'{"cdiVersion": "0.5.0"}'])
def test_what_makes_no_sense_is_read_as_nothing(directory, content):
    directory.path.mkdir(parents=True)
    (directory.path / GPU_FILE).write_bytes(content)
    assert directory.read(GPU_FILE) is None


WHOLE = {GPU_FILE: spec(mount="/", GPU_a=("/dev/nvidia0",))}  # mounts the whole file system into containers


def test_an_invalid_specification_is_not_written_and_the_file_and_others_stay(directory):
    directory.write(ONE)
    before = (directory.path / GPU_FILE).read_bytes()
    outcome = directory.write(WHOLE | CHANNEL)
    assert (outcome.changed, dict(outcome.refused), list(outcome.invalid)) == ((IMEX_FILE,), {}, [GPU_FILE])
    assert "hostPath" in outcome.invalid[GPU_FILE]
    assert (directory.path / GPU_FILE).read_bytes() == before
    assert directory.write(TWO).changed == (GPU_FILE, IMEX_FILE)
    assert directory.write(TWO).invalid == {}


def test_an_invalid_specification_is_none_though_its_file_is_there_already(directory):
    directory.path.mkdir(parents=True)
    content = to_json(WHOLE[GPU_FILE])
    (directory.path / GPU_FILE).write_bytes(content)
    (directory.path / GPU_FILE).chmod(0o644)
    assert list(directory.write(WHOLE).invalid) == [GPU_FILE]
    assert (directory.path / GPU_FILE).read_bytes() == content


LINK = "mv cdi elsewhere && ln -s elsewhere cdi && chown -h {} cdi"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("chmod 775 cdi", "0775"),
        ("chmod 757 cdi", "0757"),
        ("chmod 1777 cdi", "1777"),
        ("chown 1000 cdi", "1000"),
        ("chmod 777 .", "0777"),
        (LINK.format(1000), "1000"),
    ],
)
def test_a_directory_whose_files_others_may_replace_is_complained_of(directory, change, named):
    assert directory.complaints() == ()
    directory.write(ONE)
    assert directory.complaints() == ()
    subprocess.run(change, shell=True, check=True, cwd=directory.path.parent)
    (sentence,) = directory.complaints()
    assert str(directory.path) in sentence
    assert named in sentence
    assert "chmod go-w" in sentence or "chown" in sentence


def test_a_directory_that_a_link_of_root_leads_to_is_none_to_complain_of(directory):
    directory.write(ONE)
    subprocess.run(LINK.format(os.geteuid()), shell=True, check=True, cwd=directory.path.parent)
    assert directory.complaints() == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_file_of_another_user_is_replaced_though_it_says_the_same(directory):
    directory.write(ONE)
    (name,) = ONE
    os.chown(directory.path / name, 1000, 0)  # who could change it whenever a container starts
    assert directory.write(ONE).changed == (name,)
    assert (directory.path / name).stat().st_uid == 0
    assert directory.write(ONE).changed == ()
