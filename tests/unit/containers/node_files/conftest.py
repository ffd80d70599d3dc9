import pytest

from tests.unit.containers.node_files.node import NodeTree


@pytest.fixture
def node(tmp_path):
    """An empty root directory of a node."""
    root = tmp_path / "node"
    root.mkdir()
    return NodeTree(root)
