"""Files that container runtimes read although the JSON Schema refuses them."""

import pytest

from gpu_plugin.containers.cdi_files.files import judge_content
from tests.unit.containers.cdi_files.specs import JSON, NO_YAML, READ_AS_YAML

YAML = """
cdiVersion: 0.7.0
kind: vendor.com/class
annotations: {example.com/a: %s}
containerEdits:
devices:
- name: %s
  containerEdits:
    hooks: [{hookName: prestart, path: /x, args: [%s], timeout: 3}]
    deviceNodes: [{path: /dev/x, major: 0x10, minor: 1, uid: 0}]
    additionalGids: [7]
    env:
"""


@pytest.mark.parametrize(
    "written", ["0", "00", "010", "0x10", "1_000", "1.50", "1e3", "yes", "true", "1:0", "2026-01-01"]
)
def test_a_yaml_value_stands_for_the_text_as_it_is_written(written):
    spec, faults, refused = judge_content((YAML % (written, written, written)).encode())
    assert spec is not None
    assert faults
    assert refused == ()
    (device,) = spec.devices
    (node,) = device.container_edits.device_nodes
    assert (device.name, device.container_edits.hooks[0].args, *spec.annotations.values()) == (
        written,
        (written,),
        written,
    )
    assert (node.major, node.uid, device.container_edits.hooks[0].timeout) == (16, 0, 3)
    assert device.container_edits.additional_gids == (7,)


@pytest.mark.parametrize(("written", "name"), [("7", "7"), ("1.5", "1.5"), ("true", "true"), ("false", "false")])
def test_a_json_value_stands_for_its_text(written, name):
    spec, faults, refused = judge_content((JSON % written).encode())
    assert spec is not None
    assert faults
    assert refused == ()
    assert [device.name for device in spec.devices] == [name]


def test_a_text_does_not_stand_for_a_number():
    spec, _, refused = judge_content((YAML % ("a", "a", "a")).replace("uid: 0", "uid: '0'").encode())
    assert spec is None
    assert refused


MODE = """cdiVersion: 0.7.0
kind: v.com/c
devices: [{name: a, containerEdits: {deviceNodes: [{path: /dev/x, fileMode: %s}]}}]
"""


@pytest.mark.parametrize(("written", "mode"), [("0o666", 0o666), ("0O6_66", 0o666), ("1e2", 100), ("0x81b6", 0o666)])
def test_a_file_mode_is_read_as_the_yaml_library_of_runtimes_reads_it(written, mode):
    spec, faults, refused = judge_content((MODE % written).encode())
    assert spec is not None
    assert faults
    assert refused == ()
    assert spec.devices[0].container_edits.device_nodes[0].file_mode == mode


@pytest.mark.parametrize("written", ["'0o666'", "-0o666", "4294967296", "true", "0o888"])
def test_a_file_mode_that_runtimes_refuse_refuses_the_file(written):
    spec, _, refused = judge_content((MODE % written).encode())
    assert spec is None
    assert refused


@pytest.mark.parametrize("rest", ["---\nkind: other\n", "---\n: [\n"])
def test_runtimes_read_the_first_document_alone(rest):
    spec, faults, refused = judge_content((MODE % "1" + rest).encode())
    assert spec is not None
    assert faults
    assert refused == ()


def test_runtimes_read_json_with_text_after_it():
    spec, faults, refused = judge_content((JSON % '"a"' + "\ntext").encode())
    assert spec is not None
    assert faults
    assert refused == ()


def test_yaml_in_which_runtimes_refuse_an_escape_is_refused():
    spec, _, refused = judge_content((YAML % ("a", r'"a\/b"', "a")).encode())
    assert spec is None
    assert refused


def test_a_comment_or_plain_text_may_have_any_backslash():
    spec, _, refused = judge_content((YAML % ("a", "a", r"'a\/b'")).encode() + rb"# \/")
    assert spec is not None
    assert refused == ()


@pytest.mark.parametrize("written", NO_YAML.values(), ids=NO_YAML)
def test_json_that_runtimes_refuse_as_yaml_is_refused_with_one_sentence(written):
    spec, faults, refused = judge_content(written.encode())
    assert spec is None
    assert faults == refused
    (sentence,) = refused
    assert "YAML" in sentence


@pytest.mark.parametrize("written", READ_AS_YAML.values(), ids=READ_AS_YAML)
def test_json_that_runtimes_read_as_yaml_is_valid(written):
    spec, faults, _ = judge_content(written.encode())
    assert spec is not None
    assert faults == ()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("filling", ["\n\t", "\n", " ", "\t"])
def test_much_white_space_takes_no_time_and_is_valid(filling):
    spec, faults, _ = judge_content(JSON.replace(": ", f":{filling * 500_000}", 1).replace("%s", '"a"').encode())
    assert spec is not None
    assert faults == ()
