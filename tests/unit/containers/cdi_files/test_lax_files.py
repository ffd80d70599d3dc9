"""Files that container runtimes read although the JSON Schema refuses them."""

import pytest

from gpu_plugin.containers.cdi_files.files import judge_content

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

JSON = '{"cdiVersion": "0.7.0", "kind": "v.com/c", "devices": [{"name": %s, "containerEdits": {"env": ["A=b"]}}]}'


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
