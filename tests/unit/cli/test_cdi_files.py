"""`gpu-plugin cdi list` and `validate` of whole directories: which file counts, links, roots, and simulated nodes."""

import json

import pytest


def spec(*devices):
    edits = {"env": ["A=1"]}
    made = [{"name": name, "containerEdits": edits} for name in devices]
    return json.dumps({"cdiVersion": "0.5.0", "kind": "a.com/b", "devices": made})


@pytest.fixture
def root(tmp_path):
    """A node's files, in which /var/run leads to /run, as distributions have it."""
    (tmp_path / "node/etc/cdi").mkdir(parents=True)
    (tmp_path / "node/run/cdi").mkdir(parents=True)
    (tmp_path / "node/var").mkdir()
    (tmp_path / "node/var/run").symlink_to("/run")
    return tmp_path / "node"


def test_a_name_is_listed_once_from_the_directory_that_wins(cdi, root):
    (root / "etc/cdi/a.json").write_text(spec("x", "y"))
    (root / "run/cdi/b.json").write_text(spec("y"))
    for named in (root, f"{root}/"):
        assert cdi("list", "--root", named) == (0, "a.com/b=x\na.com/b=y\n", "")
    rows = json.loads(cdi("list", "--root", root, "--json")[1])
    assert rows == [
        {"name": "a.com/b=x", "file": f"{root}/etc/cdi/a.json"},
        {"name": "a.com/b=y", "file": f"{root}/var/run/cdi/b.json"},
    ]
    turned = cdi("list", "--root", root, "--cdi-dir", "/var/run/cdi", "--cdi-dir", "etc/cdi", "--json")[1]
    assert {row["file"] for row in json.loads(turned)} == {f"{root}/etc/cdi/a.json"}
    assert cdi("validate", "--root", root)[0] == 0


def test_a_conflict_is_a_fault_of_both_files(cdi, root):
    for name in ("a.json", "b.json"):
        (root / "etc/cdi" / name).write_text(spec("x"))
    (root / "etc/cdi/c.yaml").write_text(spec("z"))
    status, text, error = cdi("list", "--root", root)
    assert (status, text) == (1, "a.com/b=z\n")
    assert [line.partition(": ")[0] for line in error.splitlines()] == [f"{root}/etc/cdi/{n}.json" for n in "ab"]
    status, text, _ = cdi("validate", "--cdi-dir", root / "etc/cdi")
    assert status == 2
    assert text.count(": conflict: a.com/b=x is in ") == 2
    assert text.count(": valid") == 1
    assert cdi("validate", root / "etc/cdi/a.json", root / "etc/cdi/b.json")[0] == 0  # need not be where runtimes look


# Runtimes read null as a missing value, and a number as text.
LAX = {
    "empty common edits": 'devices: [{name: "x", containerEdits: {env: [A=1]}}]\ncontainerEdits:\n',
    "empty annotations": 'devices: [{name: "x", containerEdits: {env: [A=1]}, annotations: null}]\n',
    "null among texts": 'devices: [{name: "x", containerEdits: {env: [null, A=1]}}]\n',
    "an empty item": 'devices:\n- {name: "x", containerEdits: {env: [A=1]}}\n-\n',
}


@pytest.mark.parametrize("devices", LAX.values(), ids=LAX)
def test_a_file_that_runtimes_serve_despite_the_schema_is_listed_and_conflicts(cdi, root, devices):
    (root / "etc/cdi/a.yaml").write_text(f"cdiVersion: 0.6.0\nkind: a.com/b\n{devices}")
    assert cdi("list", "--root", root) == (0, "a.com/b=x\n", "")
    status, text, _ = cdi("validate", "--root", root)
    assert status == 2
    assert "'null'" in text
    (root / "etc/cdi/b.json").write_text(spec("x", "y"))
    status, text, error = cdi("list", "--root", root)
    assert (status, text) == (1, "a.com/b=y\n")
    assert error.count(": conflict: a.com/b=x is in ") == 2
    assert cdi("validate", "--root", root)[1].count(": conflict: ") == 2


def test_a_device_without_edits_is_served_by_no_runtime(cdi, root):
    (root / "etc/cdi/a.yaml").write_text(
        "cdiVersion: 0.5.0\nkind: a.com/b\ndevices: [{name: x, containerEdits: {env: null}}]\n"
    )
    status, text, error = cdi("list", "--root", root)
    assert (status, text) == (1, "")
    assert "must change something" in error


def test_links_are_followed_within_the_root(cdi, root, tmp_path):
    (tmp_path / "outside.json").write_text(spec("x"))
    (root / "etc/cdi/a.json").symlink_to(tmp_path / "outside.json")
    status, text, error = cdi("list", "--root", root)
    assert (status, text) == (1, "")
    assert error == f"{root}/etc/cdi/a.json: it is a link without a target below {root}\n"
    (root / "opt").mkdir()
    (root / "opt/a.json").write_text(spec("y"))
    (root / "etc/cdi/a.json").unlink()
    (root / "etc/cdi/a.json").symlink_to("/opt/a.json")
    assert cdi("list", "--root", root) == (0, "a.com/b=y\n", "")


def test_host_paths_are_those_of_the_root(cdi, root):
    (root / "etc/cdi/a.json").write_text(spec("x").replace('"env": ["A=1"]', '"deviceNodes": [{"path": "/dev/null"}]'))
    assert cdi("validate", "--cdi-dir", root / "etc/cdi", "--host-paths")[0] == 0
    status, text, _ = cdi("validate", "--root", root, "--host-paths")
    assert (status, text) == (2, f"{root}/etc/cdi/a.json: /dev/null does not exist below {root}\n")
    assert cdi("validate", root / "etc/cdi/a.json", "--root", root, "--host-paths")[0] == 2
    (root / "dev").mkdir()
    (root / "dev/null").touch()
    assert cdi("validate", "--root", root, "--host-paths")[0] == 0


@pytest.mark.parametrize("verb", ["list", "validate"])
def test_a_simulated_nodes_specifications(cdi, verb):
    status, text, error = cdi(verb, "--simulate", "hgx-h100")
    assert (status, error) == (0, "")
    if verb == "list":
        made = json.loads(cdi("generate", "--simulate", "hgx-h100")[1])
        assert text.splitlines() == [f"{made['kind']}={device['name']}" for device in made["devices"]]
    else:
        assert text.startswith("k8s.device-plugin.nvidia.com-gpu.json: valid, k8s.device-plugin.nvidia.com/gpu ")


@pytest.mark.parametrize("verb", ["list", "validate"])
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--simulate", "no-such"], 2, "no simulated node is called 'no-such'"),
        (["--simulate", "h200", "--root", "/dev"], 1, "the driver root /dev has no libcuda.so"),
        (
            ["--simulate", "h200", "--cdi-dir", "/etc"],
            2,
            "--simulate makes specifications, and --cdi-dir names other files",
        ),
        (["--root", "/no/such/node"], 2, "--root: /no/such/node: there is no such directory"),
        (["--root", "/dev", "--cdi-dir", "/cdi"], 2, "--cdi-dir: /dev/cdi: there is no such directory"),
    ],
)
def test_what_cannot_be_is_one_line(cdi, verb, arguments, status, words):
    got, text, error = cdi(verb, *arguments)
    assert (got, text) == (status, "")
    [line] = error.splitlines()
    assert words in line


def test_a_file_and_a_simulated_node_are_too_much(cdi, root):
    status, _, error = cdi("validate", root, "--simulate", "h200")
    assert status == 2
    assert "--simulate makes specifications, and FILE names other files" in error


def test_a_root_without_specifications_is_said(cdi, root):
    nothing = f"there is no specification in {root}/etc/cdi, {root}/var/run/cdi"
    assert cdi("list", "--root", root) == (0, "", f"gpu-plugin cdi list: {nothing}\n")
    status, _, error = cdi("validate", "--root", root)
    assert status == 2
    assert f"there is no specification in {root}/etc/cdi, {root}/var/run/cdi: " in error
