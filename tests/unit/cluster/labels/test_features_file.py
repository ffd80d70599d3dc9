"""The file for Node Feature Discovery: whole or not at all, and whose it is."""

import errno
import os
import stat

import pytest

from gpu_plugin.cluster.labels import features_file
from gpu_plugin.cluster.labels.features_file import FEATURES_FILE, AwayError, FeaturesFile, WrittenFiles, same
from gpu_plugin.config.names import PRESENT, TIMESTAMP
from gpu_plugin.state.directory import StateDirectory
from tests.unit.cluster.labels.recorded import names

LABELS = {PRESENT: "true", "nvidia.com/gpu.count": "8", "nvidia.com/cuda.driver.rev": "", TIMESTAMP: "1594644571"}


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "features.d").mkdir()
    return tmp_path / "features.d"


OURS = LABELS | {f"nvidia.com/{name}": "x" for name in ("gpu.machine", "gpu.mode", "mig.capable")}
"""The labels that every file of this plugin has."""


class Begun:
    """The file in a new process, which stores each change at once if the state directory can be written."""

    def __init__(self, directory, state):
        self._state = StateDirectory(state)
        self._directory = directory
        self.memory = self._state.read(FEATURES_FILE, WrittenFiles) or WrittenFiles()

    @property
    def file(self):
        return FeaturesFile(self._directory, self.memory)

    def read(self):
        return self.file.read()

    def write(self, labels):
        self.keep(self.file.digests(labels))
        self.file.write(labels)

    def claim(self, labels):
        if self.file.equals(labels):
            self.keep(self.file.digests(labels))

    def remove(self):
        removed, digests = self.file.remove()
        self.keep(digests)
        return removed

    def keep(self, digests):
        self.memory = self.memory.updated(self.file.path, digests)
        self._state.write(FEATURES_FILE, self.memory)


def begun(directory, state):
    return Begun(directory, state)


def lines(labels):
    return "".join(f"{key}={value}\n" for key, value in labels.items())


def test_it_is_a_line_each_in_alphabetical_order_readable_for_all(directory, state):
    file = begun(directory, state)
    assert file.read() == {}
    file.write(LABELS)
    assert (directory / "gfd").read_text() == (
        "nvidia.com/cuda.driver.rev=\nnvidia.com/gfd.timestamp=1594644571\n"
        "nvidia.com/gpu.count=8\nnvidia.com/gpu.present=true\n"
    )
    assert stat.S_IMODE((directory / "gfd").stat().st_mode) == 0o644
    assert file.read() == LABELS
    assert names(directory) == ["gfd"]


def test_what_an_earlier_process_wrote_is_removed_with_what_a_kill_left_and_nothing_else(directory, state):
    assert not begun(directory, state).remove()
    begun(directory, state).write(LABELS)
    (directory / ".gfd.a1b2c3d4").touch()
    (directory / "other").touch()
    assert begun(directory, state).remove()
    assert names(directory) == ["other"]
    assert not begun(directory, state).remove()


@pytest.mark.parametrize("content", [
    "nvidia.com/gpu.count=8\nnvidia.com/cuda.driver.rev=\nnvidia.com/gfd.timestamp=1594644571\n",
    "nvidia.com/gpu.present=true\n",
    "nvidia.com/gfd.timestamp=1594644571\nnvidia.com/gpu.count=4\nnvidia.com/gpu.present=true\n",
], ids=["GPU Feature Discovery's", "one label", "looks like ours"])  # fmt: skip
@pytest.mark.parametrize("after_ours", [False, True])
def test_a_file_that_somebody_else_wrote_stays(directory, state, content, after_ours):
    if after_ours:
        begun(directory, state).write(LABELS)
    (directory / "gfd").write_text(content)
    assert not begun(directory, state).remove()
    assert (directory / "gfd").read_text() == content
    begun(directory, state).write(LABELS)
    assert begun(directory, state).remove(), "what it was replaced by does not"


@pytest.mark.parametrize(("error", "times"), [(SystemExit(), 1), (OSError(errno.EROFS, "Read-only file system"), 9)])
def test_a_file_that_was_not_replaced_stays_known(directory, state, monkeypatch, error, times):
    begun(directory, state).write(LABELS)

    def fail(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(features_file, "replace_file", fail)
        for stamp in range(times):
            with pytest.raises(type(error)):
                begun(directory, state).write({**LABELS, TIMESTAMP: str(stamp)})
    assert begun(directory, state).read() == LABELS
    assert begun(directory, state).remove()


def test_a_write_that_hung_and_ended_late_is_ours(directory, state):
    late = begun(directory, state)
    for count in ("7", "8"):
        written = begun(directory, state)
        written.keep(written.file.digests({**LABELS, "nvidia.com/gpu.count": count}))
    late.file.write({**LABELS, "nvidia.com/gpu.count": "7"})
    assert begun(directory, state).remove()


def test_a_state_directory_that_was_lost_is_mended_by_a_file_that_is_ours_to_the_byte(directory, state, tmp_path):
    begun(directory, state).write(LABELS)
    begun(directory, tmp_path / "new").claim({**LABELS, "nvidia.com/gpu.count": "7"})
    assert not begun(directory, tmp_path / "new").remove()
    begun(directory, tmp_path / "new").claim(LABELS)
    assert begun(directory, tmp_path / "new").remove()


@pytest.mark.parametrize(("content", "removed"), [
    (lines(dict(sorted(OURS.items()))), True),
    (lines(dict(sorted(OURS.items(), reverse=True))), False),
    (lines({key: value for key, value in sorted(OURS.items()) if key != PRESENT}), False),
    (lines(dict(sorted(OURS.items()))) + "# mine\n", False),
], ids=["as this plugin writes it", "in no order", "GPU Feature Discovery's labels", "with a remark"])  # fmt: skip
def test_where_nothing_is_remembered_a_file_that_only_this_plugin_writes_is_removed(directory, state, content, removed):
    (directory / "gfd").write_text(content)
    assert begun(directory, state).remove() is removed
    assert names(directory) == ["gfd"] * (not removed)
    begun(directory, state).write(LABELS)
    (directory / "gfd").write_text(content)
    for _ in range(2):
        assert not begun(directory, state).remove(), "it is known to be another one than was written"


def test_without_a_state_directory_this_process_knows_what_it_wrote(directory, tmp_path):
    (tmp_path / "state").touch()
    file = begun(directory, tmp_path / "state")
    file.write(LABELS)
    assert file.remove()


def test_a_directory_that_is_away_is_remembered_and_one_that_is_empty_is_not(directory, state):
    begun(directory, state).write(LABELS)
    directory.rename(directory.with_name("away"))
    with pytest.raises(AwayError, match="its directory is not there"):
        begun(directory, state).remove()
    assert begun(directory, state).memory.directories() == {str(directory)}
    directory.with_name("away").rename(directory)
    assert begun(directory, state).remove()
    assert begun(directory, state).memory.directories() == frozenset()
    directory.rmdir()
    assert not begun(directory, state).remove()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"no label\n=\n", b"nvidia.com/gpu.count=8\n" * 9999])
def test_a_file_of_anything_is_read_and_is_not_ours(directory, state, content):
    (directory / "gfd").write_bytes(content)
    file = begun(directory, state)
    assert set(file.read()) <= {"", "nvidia.com/gpu.count"}
    assert not file.remove()
    assert (directory / "gfd").read_bytes() == content


def test_what_is_no_file_is_replaced_and_never_waited_for(directory, state):
    os.mkfifo(directory / "gfd")
    file = begun(directory, state)
    assert file.read() == {}
    file.write(LABELS)
    assert file.read() == LABELS
    (directory / "gfd").unlink()
    (directory / "elsewhere").write_text("mine=1\n")
    (directory / "gfd").symlink_to("elsewhere")
    assert file.read() == {}
    file.write(LABELS)
    assert (directory / "elsewhere").read_text() == "mine=1\n"


def test_what_is_compared_is_what_the_labels_say():
    assert same(LABELS, {**LABELS, TIMESTAMP: "1"})
    assert same(LABELS, {key: value for key, value in LABELS.items() if key != PRESENT})
    assert not same(LABELS, {**LABELS, "nvidia.com/gpu.count": "7"})
    assert not same(LABELS, {})
