"""The links in the status, and their picture."""

import pytest

from gpu_plugin.devices.device import Resource, whole_gpu, with_reason
from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.views.report import offered
from gpu_plugin.status.links import links

GPUS = tuple(Gpu(f"GPU-{at}", at) for at in range(4))
PAIR = Node(GPUS, {("GPU-0", "GPU-1"): Link(nvlinks=4)})


def served(*reasons: str):
    devices = tuple(with_reason(whole_gpu(gpu), why) for gpu, why in zip(GPUS, reasons, strict=True))
    return [offered(Resource("r", devices), "distributed")]


def test_links_are_words_a_table_and_a_picture():
    found, drawn = links(PAIR, served("", "", "", ""), "node-1")
    assert found is not None
    assert found.gpus == (0, 1, 2, 3)
    assert found.rows[0][:2] == ("X", "NV4")
    assert found.words
    assert set(found.legend) >= {"X", "NV#"}
    assert drawn.startswith("<svg")
    assert "node-1" in drawn


def test_a_gpu_that_pods_do_not_get_changes_the_picture_and_its_version():
    well, drawn = links(PAIR, served("", "", "", ""), "node-1")
    sick, struck = links(PAIR, served("", "Xid 79", "", ""), "node-1")
    assert well is not None
    assert sick is not None
    assert (drawn == struck, well.version == sick.version) == (False, False)


@pytest.mark.parametrize("node", [Node(GPUS[:1], {}), Node(GPUS, {}), Node((), {})])
def test_without_links_there_is_nothing(node):
    assert links(node, [], "node-1") == (None, "")
