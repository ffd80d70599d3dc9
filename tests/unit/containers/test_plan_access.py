import msgspec
import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.containers.edits import CONTROL_NODES, Access
from gpu_plugin.containers.plan import access_warnings, cdi_classes, missing_channels, plan_access
from gpu_plugin.devices.node import Gpu, Node

DEFAULTS = resolve({}, {})
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"


def planned(*device_nodes: str, **asked: object) -> Access:
    """The access on a node with these device nodes."""
    settings = msgspec.structs.replace(DEFAULTS, **asked)
    return plan_access(settings, Node(device_nodes=frozenset(device_nodes)), "/host")


def warned(*device_nodes: str, **asked: object) -> tuple[str, ...]:
    """The warnings on such a node."""
    settings = msgspec.structs.replace(DEFAULTS, **asked)
    return tuple(access_warnings(settings, Node(device_nodes=frozenset(device_nodes))))


def test_a_strategy_that_is_not_chosen_yet_is_never_planned_with():
    with pytest.raises(AssertionError, match="chosen before"):
        planned(device_list_strategy=("auto",))


def test_what_is_asked_for_is_given():
    assert planned() == Access(dev_root="/host")
    assert planned(
        device_list_strategy=("cdi-cri", "envvar"),
        device_id_strategy="index",
        pass_device_specs=True,
        cdi_annotation_prefix="a.example/",
    ) == Access(
        ("cdi-cri", "envvar"), "index", pass_device_specs=True, dev_root="/host", annotation_prefix="a.example/"
    )


@pytest.mark.parametrize("missing", CONTROL_NODES)
def test_control_nodes_are_those_that_exist_in_a_fixed_order(missing):
    assert planned(*frozenset(CONTROL_NODES) - {missing}).control_nodes == tuple(
        n for n in CONTROL_NODES if n != missing
    )


GPUS = Node((Gpu("GPU-a", 0, minor=0),), device_nodes=frozenset({"/dev/nvidia0", *CONTROL_NODES}))
BY_SPECS = {"pass_device_specs": True}
BY_CDI = {"device_list_strategy": ("cdi-cri",)}


@pytest.mark.parametrize("asked", [BY_SPECS, BY_CDI])
@pytest.mark.parametrize("missing", ["/dev/nvidiactl", "/dev/nvidia-uvm"])
def test_without_a_node_that_cuda_needs_no_container_could_use_a_gpu(asked, missing):
    settings = msgspec.structs.replace(DEFAULTS, **asked)
    node = msgspec.structs.replace(GPUS, device_nodes=GPUS.device_nodes - {missing})
    access = plan_access(settings, node, None)
    assert access.missing_node.startswith(f"{missing} does not exist")
    assert "nvidia-modprobe -u -c0" in access.missing_node
    assert access.missing_node in tuple(access_warnings(settings, node))
    assert plan_access(settings, GPUS, None).missing_node == ""
    assert tuple(access_warnings(settings, GPUS)) == ()


@pytest.mark.parametrize("asked", [{}, BY_SPECS, BY_CDI])
def test_nodes_that_this_process_cannot_see_or_does_not_give_are_not_required(asked):
    settings = msgspec.structs.replace(DEFAULTS, **asked)
    seen = {"/dev/nvidia0"} if not asked else {"/dev/dxg"}
    node = msgspec.structs.replace(GPUS, device_nodes=frozenset(seen))
    assert plan_access(settings, node, None).missing_node == ""


@pytest.mark.parametrize("asked", [("gdrcopy",), ("gds",), ("mofed",), ("gdrcopy", "gds", "mofed"), ()])
def test_features_are_those_asked_for_whatever_the_node_has(asked):
    found = planned(**{f"{feature}_enabled": True for feature in asked})
    assert (found.features, found.cdi_classes) == (asked, ())


@pytest.mark.parametrize(
    ("features", "found", "classes"),
    [
        (("gdrcopy", "gds", "mofed"), {"/dev/gdrdrv", "/dev/nvidia-fs0", "/dev/infiniband/uverbs0"}, 3),
        (("gdrcopy",), {"/dev/gdrdrv", "/dev/nvidia-fs0", "/dev/infiniband/uverbs0"}, 1),
        (("gdrcopy", "gds", "mofed"), {"/dev/nvidia0"}, 0),
        ((), {"/dev/gdrdrv"}, 0),
    ],
)
def test_a_feature_is_a_cdi_class_where_its_device_nodes_exist(features, found, classes):
    assert cdi_classes(features, frozenset(found)) == features[:classes]


@pytest.mark.parametrize(
    ("feature", "device_node"),
    [("gdrcopy", "/dev/gdrdrv"), ("gds", "/dev/nvidia-fs0"), ("mofed", "/dev/infiniband/uverbs0")],
)
def test_a_feature_left_to_the_node_is_on_where_its_device_nodes_are(feature, device_node):
    asked = {f"{feature}_enabled": "auto"}
    assert (planned(**asked).features, planned(**asked).cdi_classes) == ((), ())
    found = planned(device_node, **asked)
    assert (found.features, found.cdi_classes) == ((feature,), (feature,))
    assert warned(**asked) == warned(device_node, **asked) == ()


@pytest.mark.parametrize(
    ("feature", "device_node", "others"),
    [
        ("gdrcopy", "/dev/gdrdrv", "/dev/nvidia-fs0"),
        ("gds", "/dev/nvidia-fs0", "/dev/gdrdrv"),
        ("mofed", "/dev/infiniband/uverbs0", "/dev/nvidia0"),
    ],
)
def test_a_feature_that_is_asked_for_and_not_there_is_warned_of_once(feature, device_node, others):
    asked = {f"{feature}_enabled": True}
    [sentence] = warned(others, **asked)
    assert (
        f"--{feature}-enabled is set and there is no device node {device_node.rstrip('0').removesuffix('uverbs')}"
        in sentence
    )
    assert sentence.endswith(f"or run with --{feature}-enabled=auto")
    assert warned(device_node, **asked) == ()


def test_an_imex_channel_left_to_the_node_is_given_where_it_exists():
    for required in (False, True):
        asked = {"imex_channel_ids": "auto", "imex_required": required}
        assert planned(**asked).imex_channels == ()
        assert planned(CHANNEL, **asked).imex_channels == (0,)
        assert warned(**asked) == ()


def test_an_imex_channel_that_exists_is_given():
    assert planned(CHANNEL, imex_channel_ids=(0,), imex_required=True).imex_channels == (0,)
    assert planned(CHANNEL).imex_channels == ()


def test_an_imex_channel_that_does_not_exist_is_left_out():
    assert planned(imex_channel_ids=(0,)).imex_channels == ()
    settings = msgspec.structs.replace(DEFAULTS, imex_channel_ids=(0,))
    assert missing_channels(settings, Node()) == (0,)
    assert missing_channels(settings, Node(device_nodes=frozenset({CHANNEL}))) == ()
    [sentence] = warned(imex_channel_ids=(0,))
    assert sentence.startswith(f"IMEX channel 0 is left out: {CHANNEL} does not exist on this node")
    assert warned(CHANNEL, imex_channel_ids=(0,)) == ()


def test_an_imex_channel_that_is_required_and_does_not_exist_is_a_fault():
    with pytest.raises(ConfigError, match=f"^IMEX channel 0 is required and {CHANNEL} does not exist on this node: "):
        planned(imex_channel_ids=(0,), imex_required=True)
    assert planned(imex_required=True).imex_channels == ()
