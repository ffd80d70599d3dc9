"""The file for Node Feature Discovery: whole or not at all, and whose it is."""

import os
import stat

import pytest

from gpu_plugin.labels.features_file import FeaturesFile, ours, same
from gpu_plugin.labels.keys import PRESENT, TIMESTAMP
from tests.unit.labels.recorded import names

LABELS = {PRESENT: "true", "nvidia.com/gpu.count": "8", "nvidia.com/cuda.driver.rev": "", TIMESTAMP: "1594644571"}


def test_it_is_a_line_each_in_alphabetical_order_readable_for_all(tmp_path):
    file = FeaturesFile(tmp_path)
    assert file.read() == {}
    file.write(LABELS)
    assert (tmp_path / "gfd").read_text() == (
        "nvidia.com/cuda.driver.rev=\nnvidia.com/gfd.timestamp=1594644571\n"
        "nvidia.com/gpu.count=8\nnvidia.com/gpu.present=true\n"
    )
    assert stat.S_IMODE((tmp_path / "gfd").stat().st_mode) == 0o644
    assert file.read() == LABELS
    assert ours(file.read())
    assert names(tmp_path) == ["gfd"]


def test_ours_is_removed_with_what_a_killed_process_left_and_another_s_stays(tmp_path):
    file = FeaturesFile(tmp_path)
    assert not file.remove()
    file.write(LABELS)
    (tmp_path / ".gfd.a1b2c3d4").touch()
    (tmp_path / "other").touch()
    assert file.remove()
    assert names(tmp_path) == ["other"]
    theirs = "nvidia.com/gpu.count=8\nnvidia.com/cuda.driver.rev=\nnvidia.com/gfd.timestamp=1594644571\n"
    (tmp_path / "gfd").write_text(theirs)
    assert not file.remove()
    assert (tmp_path / "gfd").read_text() == theirs
    assert same(file.read(), LABELS)
    file.write(LABELS)
    assert ours(file.read())


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"no label\n=\n", b"nvidia.com/gpu.count=8\n" * 9999])
def test_a_file_of_anything_is_read_and_is_not_ours(tmp_path, content):
    (tmp_path / "gfd").write_bytes(content)
    assert not ours(FeaturesFile(tmp_path).read())


def test_what_is_no_file_is_replaced_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "gfd")
    file = FeaturesFile(tmp_path)
    assert file.read() == {}
    file.write(LABELS)
    assert file.read() == LABELS
    (tmp_path / "gfd").unlink()
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "gfd").symlink_to("elsewhere")
    file.write(LABELS)
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_what_is_compared_is_what_the_labels_say():
    assert same(LABELS, {**LABELS, TIMESTAMP: "1"})
    assert same(LABELS, {key: value for key, value in LABELS.items() if key != PRESENT})
    assert not same(LABELS, {**LABELS, "nvidia.com/gpu.count": "7"})
    assert not same(LABELS, {})
