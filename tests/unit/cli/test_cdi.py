"""`gpu-plugin cdi`: generating, validating, listing and removing specifications, and its errors."""

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi_files import files as cdi_files
from gpu_plugin.simulation.profile import names

GPU_FILE = "k8s.device-plugin.nvidia.com-gpu.json"
GOOD = '{"cdiVersion": "0.5.0", "kind": "a.com/b", "devices": [{"name": "x", "containerEdits": {"env": ["A=1"]}}]}'


@pytest.mark.parametrize("form", ["json", "yaml"])
@pytest.mark.parametrize("profile", names())
def test_what_is_generated_for_every_profile_is_valid_and_the_same_each_time(cdi, tmp_path, profile, form):
    status, text, _ = cdi("generate", "--simulate", profile, "--format", form)
    assert status == 0
    assert cdi("generate", "--simulate", profile, "--format", form)[1] == text
    assert (json.loads(text) if form == "json" else yaml.safe_load(text))["devices"][-1]["name"] == "all"
    file = tmp_path / f"spec.{form}"
    file.write_text(text)
    status, text, _ = cdi("validate", file)
    assert (status, "valid, k8s.device-plugin.nvidia.com/gpu" in text) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--root", "/no/such/node"], 1, "/no/such/node/proc/driver/nvidia/gpus: No such file"),
        (["--simulate", "no-such"], 2, "no simulated node is called 'no-such'"),
        (["--simulate", "h200", "--class", "gpus"], 2, "'gpus' is unknown; there are gpu, imex-channel"),
        (["--simulate", "h200", "--class", "gds"], 1, "no device of class gds"),
        (["--simulate", "h200", "--format", "toml"], 2, "toml"),
        (["--simulate", "h200", "--output", "/proc/none"], 1, "--output: /proc/none: No such file"),
        (["--simulate", "h200", "--output", "/dev/null"], 1, "--output: /dev/null: Not a directory"),
        (["--simulate", "h200", "--output", "/dev/null/x"], 1, "Not a directory"),
        (["--simulate", "h200", "--output", "x", "--format", "yaml"], 2, "leave --format and --class out"),
        (["--simulate", "h200", "--root", "/dev"], 1, "no libcuda.so"),
        (["--mig-strategy", "many", "--simulate", "h200"], 2, "'many' is not one of"),
    ],
)
def test_what_cannot_be_generated_is_one_line(cdi, arguments, status, words):
    got, text, error = cdi("generate", *arguments)
    assert (got, text) == (status, "")
    [line] = error.splitlines()
    assert words in line


def test_output_is_a_directory_of_all_classes_that_is_listed_judged_and_removed(cdi, tmp_path):
    directory = tmp_path / "cdi"
    arguments = ("generate", "--simulate", "gb200-node", "--imex-channel-ids", "0", "--output", directory)
    status, text, _ = cdi(*arguments)
    assert status == 0
    assert len(text.splitlines()) == len(list(directory.glob("*.json")))
    assert cdi(*arguments)[1] == f"{directory}: nothing to change\n"
    (directory / "theirs.json").write_text(GOOD)
    status, text, _ = cdi("list", "--cdi-dir", directory)
    assert status == 0
    assert {"a.com/b=x", "k8s.device-plugin.nvidia.com/gpu=all"} <= set(text.splitlines())
    rows = json.loads(cdi("list", "--cdi-dir", directory, "--json")[1])
    assert {"name": "a.com/b=x", "file": str(directory / "theirs.json")} in rows
    assert len(rows) == len(text.splitlines())
    assert cdi("validate", "--cdi-dir", directory)[0] == 0
    assert f"{directory / GPU_FILE}: removed" in cdi("remove", "--cdi-dir", directory)[1]
    assert [path.name for path in directory.iterdir()] == ["theirs.json"]
    assert cdi("remove", "--cdi-dir", directory) == (0, f"{directory}: nothing of this plugin's\n", "")


def test_a_file_of_this_name_that_another_program_wrote_is_left(cdi, tmp_path):
    file = tmp_path / "k8s.device-plugin.nvidia.com-gpu.json"
    file.write_text("{}")
    status, text, error = cdi("remove", "--cdi-dir", tmp_path)
    assert (status, text) == (0, "")
    assert error.startswith(f"left: {file}: ")
    assert file.exists()


def test_what_cannot_be_removed_is_said_after_the_rest_is(cdi, tmp_path, monkeypatch):
    cdi("generate", "--simulate", "gb200-node", "--imex-channel-ids", "0", "--output", tmp_path)
    unlink = Path.unlink

    def refused(path, **options):
        if path.name == GPU_FILE:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    status, text, error = cdi("remove", "--cdi-dir", tmp_path)
    assert status == 1
    assert "imex-channel.json: removed" in text
    assert f"{GPU_FILE}: Operation not permitted" in error


def bomb(levels, width):
    """A few lines of aliases with width**levels values."""
    lines = ["a0: &a0 x"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * width)}]" for at in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "missing required field"),
        (b"\xff\xfe\x00x", "not UTF-8"),
        (b"a" * (17 * 1024 * 1024), "larger than 16777216 bytes"),
        (b"{" + b" " * (5 * 1024 * 1024) + b"x", "more than any CDI specification in YAML has"),
        (b'{"a":' * 100_000, "nested too deep"),
        (bomb(9, 10).encode(), "aliases make more than"),
        (GOOD.replace('{"cdi', '{"cdiVersion": "0.6.0", "cdi').encode(), "'cdiVersion' appears twice"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b'{"\\u001b[31m": 1}', "unknown field '\\x1b[31m'"),
        (GOOD.replace("A=1", "A").encode(), "$.devices[0].containerEdits.env[0]"),
    ],
    ids=range(10),
)
@pytest.mark.timeout(20)
def test_a_file_that_is_no_specification_is_a_sentence_and_status_2(cdi, tmp_path, monkeypatch, content, words):
    monkeypatch.setattr(cdi_files, "YAML_LIMITS", replace(cdi_files.YAML_LIMITS, most_values=10_000))
    file = tmp_path / "x.json"
    file.write_bytes(content)
    status, text, error = cdi("validate", file)
    assert (status, error) == (2, "")
    [line] = text.splitlines()
    assert line.startswith(f"{file}: ")
    assert words in line
    assert line.isprintable()
    assert cdi("list", "--cdi-dir", tmp_path)[0] == 1


def test_every_fault_of_every_file_is_said(cdi, tmp_path):
    (tmp_path / "a.json").write_text(GOOD.replace("a.com/b", "b").replace('"x"', '"x="'))
    (tmp_path / "b.yaml").write_text("a: 1\na: 2\nb: 3\nb: 4\n")
    (tmp_path / "c.json").write_text(GOOD)
    (tmp_path / "d.txt").write_text("no runtime reads this")
    status, text, _ = cdi("validate", "--cdi-dir", tmp_path)
    assert status == 2
    assert [Path(line.split(": ")[0]).name for line in text.splitlines()] == ["a.json"] * 2 + ["b.yaml"] * 2 + [
        "c.json"
    ]
    status, text, error = cdi("list", "--cdi-dir", tmp_path)
    assert (status, text) == (1, "a.com/b=x\n")
    assert len(error.splitlines()) == 4


@pytest.mark.parametrize("indented", ["\t", " "])
def test_json_is_read_however_it_is_indented(cdi, tmp_path, indented):
    file = tmp_path / "x.yaml"  # runtimes go by the content
    file.write_text(json.dumps(json.loads(GOOD), indent=indented))
    assert cdi("validate", file) == (0, f"{file}: valid, a.com/b 0.5.0, 1 devices\n", "")


def test_pipes_directories_and_missing_files_are_named(cdi, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "dir.json").mkdir()
    status, text, _ = cdi("validate", tmp_path / "pipe.json", tmp_path / "dir.json", tmp_path / "none.json")
    assert status == 2
    assert [line.partition(": ")[2] for line in text.splitlines()] == [
        "it is a named pipe", "it is a directory", "No such file or directory",
    ]  # fmt: skip


def test_a_file_whose_name_is_no_text_is_named_all_the_same(cdi, tmp_path):
    (tmp_path / os.fsdecode(b"\xff\x1b.json")).write_text("{")
    status, text, _ = cdi("validate", "--cdi-dir", tmp_path)
    assert status == 2
    assert "\\udcff\\x1b.json: " in text


def test_host_paths_are_judged_if_asked_for(cdi, tmp_path):
    file = tmp_path / "x.json"
    mounts = [{"hostPath": path, "containerPath": "/x"} for path in (str(file), "/no/such/file")]
    file.write_text(json.dumps(json.loads(GOOD) | {"containerEdits": {"mounts": mounts}}))
    assert cdi("validate", file)[0] == 0
    assert cdi("validate", file, "--host-paths") == (2, f"{file}: /no/such/file does not exist on this machine\n", "")


@pytest.mark.parametrize("verb", ["list", "validate"])
def test_a_directory_that_was_named_must_be_there(cdi, tmp_path, verb):
    status, text, error = cdi(verb, "--cdi-dir", tmp_path / "none")
    assert (status, text) == (2, "")
    assert "there is no such directory" in error
    (tmp_path / "file").write_text("")
    assert cdi(verb, "--cdi-dir", tmp_path / "file")[0] == 1


def test_validate_without_anything_to_judge_says_so(cdi, tmp_path):
    status, _, error = cdi("validate", "--cdi-dir", tmp_path)
    assert status == 2
    assert "there is no specification in" in error


@pytest.mark.parametrize(("content", "status"), [(GOOD, 0), ("{", 2), (" " * (17 * 1024 * 1024), 2)])
def test_standard_input_is_judged_like_a_file(cdi, monkeypatch, content, status):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    got, text, _ = cdi("validate", "-")
    assert got == status
    assert text.startswith("-: ")
    assert ("larger than" in text) is (len(content) > 1000)


def test_standard_input_that_is_closed_is_a_sentence(cdi, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert cdi("validate", "-") == (2, "-: standard input is closed\n", "")


def test_what_generate_leaves_out_is_said_as_the_daemon_says_it(cdi, tmp_path):
    status, out, error = cdi(
        "generate",
        "--simulate",
        "t4-4",
        "--gds-enabled",
        "true",
        "--include-gpus",
        "0,99",
        "--output",
        tmp_path / "cdi",
    )
    assert (status, "gpu.json: written" in out) == (0, True)
    assert "--gds-enabled is set and there is no device node /dev/nvidia-fs*" in error
    assert "'99' on the list of GPUs to include is none of this node's GPUs" in error
    assert "no runtime can use them" in error
    assert cdi("generate", "--simulate", "t4-4", "--class", "gds")[2].endswith("or --gds-enabled does not enable it\n")


def test_an_invalid_specification_is_neither_printed_nor_written(cdi, tmp_path, monkeypatch):
    from gpu_plugin.cli import cdi_source  # noqa: PLC0415
    from tests.unit.containers.cdi_files.specs import spec  # noqa: PLC0415

    whole = Built({GPU_FILE: spec(mount="/", GPU_a=("/dev/nvidia0",))})
    monkeypatch.setattr(cdi_source, "built", lambda *_: whole)
    for more in ((), ("--format", "yaml"), ("--output", tmp_path / "cdi")):
        status, text, error = cdi("generate", "--simulate", "h200", *more)
        assert (status, text) == (1, "")
        assert "invalid: $.containerEdits.mounts[0].hostPath" in error
    assert not (tmp_path / "cdi").exists()


@pytest.mark.parametrize("root", ["/run/nvidia//driver", "/run/./nvidia/driver/", "//run/nvidia/driver"])
def test_a_driver_root_may_be_written_with_needless_slashes(cdi, root):
    status, text, error = cdi("generate", "--simulate", "h200", "--nvidia-driver-root", root, "--nvidia-dev-root", root)
    assert (status, error) == (0, "")
    edits = json.loads(text)["containerEdits"]
    assert {each["hostPath"].rpartition("/usr/")[0] for each in edits["mounts"]} == {"/run/nvidia/driver"}
    assert {each["hostPath"].rpartition("/dev/")[0] for each in edits["deviceNodes"]} == {"/run/nvidia/driver"}
