"""Files of other programs that have this plugin's CDI names, in the directory that runtimes read."""

import json

import pytest

from gpu_plugin.containers.cdi.spec import to_json
from gpu_plugin.containers.cdi_files import files
from gpu_plugin.containers.cdi_files.files import NameConflicts
from tests.unit.containers.cdi_files.specs import GPU_FILE, IMEX_FILE, spec

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
        ("escaped.yaml", YAML.replace(KIND, KIND.replace("nvidia", r"\x6evidia").join('""'))),
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


@pytest.fixture
def standard(tmp_path):
    """The directories that runtimes read, the later first in rank."""
    made = tmp_path / "etc", tmp_path / "run"
    for each in made:
        each.mkdir()
    return made


def test_a_device_that_a_directory_of_higher_rank_has_too_is_refused(standard):
    static, dynamic = standard
    (static / GPU_FILE).write_bytes(to_json(OURS))
    (dynamic / "other.yaml").write_text(YAML)
    [(refused, why)] = NameConflicts(static, standard).find().items()
    assert refused == f"{KIND}=GPU-b"
    assert str(dynamic / "other.yaml") in why


def test_a_directory_of_lower_rank_matters_only_if_two_files_of_it_have_a_device(standard):
    static, dynamic = standard
    (dynamic / GPU_FILE).write_bytes(to_json(OURS))
    (static / "one.yaml").write_text(YAML)
    conflicts = NameConflicts(dynamic, standard)
    assert conflicts.find() == {}
    (static / "two.yaml").write_text(YAML)
    [(refused, why)] = conflicts.find().items()
    assert refused == f"{KIND}=GPU-b"
    assert str(static / "one.yaml") in why
    assert str(static / "two.yaml") in why


def test_beside_a_directory_of_the_operator_no_other_is_read(standard, directory):
    for each in ("one.yaml", "two.yaml"):
        (standard[1] / each).write_text(YAML)
    assert NameConflicts(directory, standard).find() == {}


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
