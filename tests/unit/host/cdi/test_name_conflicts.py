"""Files of other programs that have this plugin's CDI names, in the directory that runtimes read."""

import json

import pytest

from gpu_plugin.access.cdi.spec import to_json
from gpu_plugin.host.cdi import files
from gpu_plugin.host.cdi.files import NameConflicts
from tests.unit.host.cdi.specs import GPU_FILE, IMEX_FILE, spec

KIND = "k8s.device-plugin.nvidia.com/gpu"
OURS = spec(GPU_a=("/dev/nvidia0",), GPU_b=("/dev/nvidia1",))
YAML = f"""cdiVersion: 0.5.0
kind: {KIND}
devices: [{{name: GPU-b, containerEdits: {{env: [A=1]}}}}]
"""


@pytest.fixture
def directory(tmp_path):
    (tmp_path / GPU_FILE).write_bytes(to_json(OURS))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("other.yaml", YAML),
        ("another.json", to_json(spec(GPU_b=("/dev/nvidia1",), GPU_c=("/dev/nvidia2",))).decode()),
    ],
)
def test_a_device_that_another_file_has_too_is_refused(directory, name, content):
    conflicts = NameConflicts(directory)
    assert conflicts.find() == {}
    (directory / name).write_text(content)
    [(refused, why)] = conflicts.find().items()
    assert refused == f"{KIND}=GPU-b"
    assert str(directory / name) in why
    assert str(directory / GPU_FILE) in why
    (directory / name).unlink()
    assert conflicts.find() == {}


def test_files_that_runtimes_do_not_take_or_of_other_devices_conflict_with_nothing(directory):
    (directory / IMEX_FILE).write_bytes(to_json(spec("imex-channel", _0=("/dev/nvidia0",))))
    (directory / "nvidia.yaml").write_text(YAML.replace(KIND, "nvidia.com/gpu"))
    (directory / "broken.json").write_text(json.dumps({"kind": KIND}))
    (directory / "not-a-specification.txt").write_text(YAML)
    (directory / "directory.json").mkdir()
    (directory / "nowhere.json").symlink_to("nothing")
    assert NameConflicts(directory).find() == {}
    assert NameConflicts(directory / "absent").find() == {}


def test_a_file_is_read_again_only_after_a_change(directory, monkeypatch):
    (directory / "other.yaml").write_text(YAML)
    conflicts = NameConflicts(directory)
    before = conflicts.find()
    with monkeypatch.context() as unreadable:
        unreadable.delattr(files, "read_file")
        assert conflicts.find() == before
