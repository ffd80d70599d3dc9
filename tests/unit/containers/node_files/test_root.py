"""The node's file system seen through a mount: links stay within it, and only regular files of bounded size are read."""

import errno
import os
import stat

import pytest

from gpu_plugin.containers.node_files.root import MAX_MATCHES, NodeFileError, NodeRoot


@pytest.fixture
def root(node):
    return NodeRoot(node.root)


def test_links_lead_where_they_lead_on_the_node(node, root, tmp_path):
    node.put("/run/crio/version", "here")
    node.link("/var/run", "/run")
    node.link("/etc/one", "../var/run/crio/version")
    node.link("/etc/two", "/etc/one")
    node.link("/etc/up", "/../../../run/crio/version")
    (tmp_path / "secret").write_text("outside")
    node.link("/etc/out", "../../secret")
    for path in ("/var/run/crio/version", "/etc/one", "/etc/two", "/etc/up"):
        assert root.read(path, 100) == b"here", path
    assert root.read("/etc/out", 100) is None
    assert root.read("/etc/../../../../run/crio/version", 100) == b"here"


def test_links_in_circles_and_what_is_absent_are_not_there(node, root):
    node.link("/etc/a", "b")
    node.link("/etc/b", "a")
    for path in ("/etc/a", "/absent", "/etc/a/b", "/etc/\0"):
        assert root.seen(path) is None
        assert root.read(path, 10) is None
        assert root.mode(path) == 0


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(node, root, monkeypatch):
    node.put("/etc/conf.d/a.toml")

    def fail(_directory):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(NodeFileError, match=r"^/etc/conf\.d cannot be read: Input/output error$"):
        root.matching("/etc/conf.d/*")


def test_only_regular_files_of_bounded_size_are_read(node, root):
    node.put("/etc/file", "x" * 11)
    node.fifo("/etc/fifo")
    assert root.read("/etc/file", 11) == b"x" * 11
    with pytest.raises(NodeFileError, match=r"^/etc/file is larger than 10 bytes, the most"):
        root.read("/etc/file", 10)
    for path, what in (("/etc/fifo", "a named pipe"), ("/etc", "a directory")):
        with pytest.raises(NodeFileError, match=rf"^{path} is {what}$"):
            root.read(path, 10)


def test_a_file_that_becomes_a_link_on_the_way_leads_nowhere(node, root, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("outside")
    node.put("/etc/file")
    seen = root.seen

    def replaced(path):
        found = seen(path)
        found.unlink()
        found.symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr(root, "seen", replaced)
    with pytest.raises(NodeFileError, match=r"^/etc/file is a symbolic link$"):
        root.read("/etc/file", 10)


def test_sockets_and_files_are_told_apart(node, root):
    node.listen("/run/a.sock")
    node.put("/run/b.sock")
    assert stat.S_ISSOCK(root.mode("/run/a.sock"))
    assert stat.S_ISREG(root.mode("/run/b.sock"))
    with pytest.raises(NodeFileError, match=r"^/run/a\.sock is a socket$"):
        root.read("/run/a.sock", 10)


def test_patterns_of_files_are_followed_in_order(node, root):
    for name in ("b.toml", "a.toml", "c.conf"):
        node.put(f"/etc/conf.d/{name}")
    assert root.matching("/etc/conf.d/*.toml") == ("/etc/conf.d/a.toml", "/etc/conf.d/b.toml")
    assert root.matching("/etc/conf.d/c.conf") == ("/etc/conf.d/c.conf",)
    assert (
        root.matching("/etc/conf.d/d.conf") == root.matching("/absent/*") == root.matching("/etc/conf.d/c.conf/*") == ()
    )
    with pytest.raises(NodeFileError, match="has wildcards in its directory"):
        root.matching("/etc/*/a.toml")
    for at in range(MAX_MATCHES + 1):
        node.put(f"/many/{at}")
    with pytest.raises(NodeFileError, match=r"^/many/\* matches 65 files, and up to 64 are read$"):
        root.matching("/many/*")
