import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.containers.cdi import spec
from gpu_plugin.containers.cdi.spec import DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice, Spec, SpecDevice

NODE = DeviceNode(path="/dev/x")
NOTHING = Edits()


def document(name: str = "gpu0", kind: str = "vendor.com/class", common: Edits = NOTHING, **edits: Any) -> Spec:
    edits.setdefault("device_nodes", (NODE,))
    return spec.made(kind, (SpecDevice(name=name, container_edits=Edits(**edits)),), common)


@pytest.mark.parametrize(
    ("made", "version"),
    [
        (document(), "0.3.0"),
        (document(common=Edits(hooks=(Hook(hook_name="poststop", path="/x"),), env=("A=b",))), "0.3.0"),
        (document(mounts=(Mount(host_path="/a", container_path="/b", type="bind"),)), "0.4.0"),
        (document("0"), "0.5.0"),
        (document(device_nodes=(DeviceNode(path="/dev/x", host_path="/y"),)), "0.5.0"),
        (document(kind="vendor.com/cl.ass"), "0.6.0"),
        (document(additional_gids=(44,)), "0.7.0"),
        (document(intel_rdt=IntelRdt()), "0.7.0"),
        (document(intel_rdt=IntelRdt(schemata=("L3",))), "1.1.0"),
        (document(common=Edits(intel_rdt=IntelRdt(enable_monitoring=True))), "1.1.0"),
        (document(net_devices=(NetDevice(host_interface_name="a", name="b"),)), "1.1.0"),
    ],
)
def test_a_document_has_the_lowest_version_that_may_say_it(made, version):
    assert made.cdi_version == version
    assert list(spec.faults(made)) == []
    at = spec.VERSIONS.index(version)
    for higher in spec.VERSIONS[at:]:
        assert list(spec.faults(spec.from_plain(plain(made) | {"cdiVersion": higher}))) == []
        assert list(spec.faults(spec.from_plain(plain(made) | {"cdiVersion": f"v{higher}"}))) == []
    for lower in spec.VERSIONS[:at]:
        (fault,) = spec.faults(spec.from_plain(plain(made) | {"cdiVersion": lower}))
        assert (
            fault
            == f"$.cdiVersion: {lower} is too low for the content of this document, which needs {version} or later"
        )


def plain(made: Spec) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(spec.to_json(made))
    return content


def test_annotations_take_a_version_of_their_own():
    of_all = spec.from_plain(plain(document()) | {"annotations": {"example.com/a": "b"}})
    assert spec.minimum_version(of_all) == "0.6.0"
    content = plain(document())
    content["devices"][0]["annotations"] = {"a": "b"}
    assert spec.minimum_version(spec.from_plain(content)) == "0.6.0"


def test_what_is_left_out_has_its_default_and_is_not_written():
    assert plain(document()) == {
        "cdiVersion": "0.3.0",
        "kind": "vendor.com/class",
        "devices": [{"name": "gpu0", "containerEdits": {"deviceNodes": [{"path": "/dev/x"}]}}],
        "containerEdits": {},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cdiVersion": "0.2.0"}, "'0.2.0' is not one of 0.3.0, 0.4.0,"),
        ({"cdiVersion": "vv1.0.0"}, "'vv1.0.0' is not one of"),
        ({"kind": "vendor"}, "$.kind: 'vendor' is not of the form vendor/class"),
        ({"kind": "vendor.com/class\n"}, "$.kind:"),
        ({"kind": "vendor./class"}, "$.kind:"),
        ({"kind": "9vendor/class"}, "$.kind:"),
        ({"kind": "véndor/class"}, "$.kind:"),
        ({"annotations": {"": "x"}, "cdiVersion": "0.6.0"}, "$.annotations: '' is not an annotation key"),
        ({"annotations": {"a b": "x"}, "cdiVersion": "0.6.0"}, "$.annotations: 'a b' is not an annotation key"),
        ({"annotations": {"-a/b": "x"}, "cdiVersion": "0.6.0"}, "$.annotations: '-a/b' is not an annotation key"),
    ],
)
def test_what_runtimes_would_not_take_is_said_with_its_place(change, words):
    (fault,) = spec.faults(spec.from_plain(plain(document()) | change))
    assert fault.startswith("$.")
    assert words in fault


@pytest.mark.parametrize("name", ["", "-a", "a-", "a b", "a/b", "a\n", "é", "."])
def test_names_of_devices_that_runtimes_would_not_take(name):
    content = plain(document())
    content["devices"][0]["name"] = name
    try:
        faults = list(spec.faults(spec.from_plain(content)))
    except ValueError as error:
        faults = [str(error)]
    assert len(faults) == 1
    assert faults[0].startswith("$.devices[0].name: ")


def test_devices_that_are_twice_or_change_nothing():
    content = plain(document("a"))
    content["devices"] += [content["devices"][0], {"name": "b", "containerEdits": {}}]
    assert list(spec.faults(spec.from_plain(content))) == [
        "$.devices[1].name: 'a' is already listed above",
        "$.devices[2].containerEdits: empty: a device must change something",
    ]


def test_edits_that_runtimes_would_not_take():
    two = (NetDevice(host_interface_name="a", name="b"), NetDevice(host_interface_name="a", name="c"))
    assert list(spec.faults(document(net_devices=two))) == [
        "$.devices[0].containerEdits.netDevices: the same hostInterfaceName appears in two of them"
    ]
    swapped = tuple(NetDevice(host_interface_name=each.name, name=each.host_interface_name) for each in two)
    assert list(spec.faults(document(common=Edits(net_devices=swapped)))) == [
        "$.containerEdits.netDevices: the same name appears in two of them"
    ]
    for name, count in [("a", 0), ("/", 0), ("a/b", 1), ("..", 1), ("a\nb", 1)]:
        assert len(list(spec.faults(document(intel_rdt=IntelRdt(clos_id=name))))) == count


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "$: expected 'object', got 'array'"),
        ("{}", "$: object missing required field 'cdiVersion'"),
        ('{"cdiVersion": 1}', "$.cdiVersion: expected 'str', got 'int'"),
        ('{"cdiVersion": "0.3.0", "kind": "a/b", "devices": []}', "$.devices: expected 'array' of length >= 1"),
        (
            '{"cdiVersion": "0.3.0", "kind": "a/b", "devices": [{"name": "x"}]}',
            "$.devices[0]: object missing required field 'containerEdits'",
        ),
    ],
)
def test_what_has_not_the_form_of_a_document_says_where(content, message):
    with pytest.raises(ValueError) as raised:
        spec.from_json(content.encode())
    assert str(raised.value) == message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": 1} x', b"nul"])
def test_what_is_no_json_says_so(content):
    with pytest.raises(ValueError, match="not JSON"):
        spec.from_json(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner),
    max_leaves=12,
)
likely = st.fixed_dictionaries(
    {"cdiVersion": st.just("1.1.0") | json_values, "kind": st.just("a/b") | json_values},
    optional={"devices": json_values, "annotations": json_values, "containerEdits": json_values},
)


@given(likely | json_values)
def test_whatever_yaml_or_json_holds_is_read_or_refused_with_its_place(content):
    try:
        said = list(spec.faults(spec.from_plain(content)))
    except ValueError as error:
        said = [str(error)]
    assert all(each.startswith("$") for each in said)


def test_the_json_schema_is_that_of_the_classes():
    schema = msgspec.json.schema(spec.Spec)
    assert schema["$ref"] == "#/$defs/Spec"
    assert schema["$defs"]["Spec"]["required"] == ["cdiVersion", "kind", "devices"]
    assert schema["$defs"]["Spec"]["additionalProperties"] is False
