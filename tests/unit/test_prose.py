"""The check of prose: which text counts, and that a limit is never raised."""

import pytest

from tests import prose

HARD = "what is nobody's is told to whomever stands there"


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "gpu_plugin" / "one").mkdir(parents=True)
    (tmp_path / "limits.toml").write_text('"gpu_plugin/one" = 0.0\n')
    for name in ("demo", "bench", "deploy", "proto"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "LIMITS", tmp_path / "limits.toml")
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["prose", *arguments])
    return prose.main()


@pytest.mark.parametrize(
    "code",
    [f'"""{HARD}."""', f"x = 1  # {HARD}", f'log.info("{HARD} %s", x)', f'raise ValueError(f"{HARD} {{x}}")'],
    ids=["docstring", "comment", "log line", "error"],
)
def test_each_kind_of_prose_of_python_counts(root, monkeypatch, capsys, code):
    (root / "gpu_plugin" / "one" / "file.py").write_text(code + "\n")
    assert run(monkeypatch) == 1
    assert "gpu_plugin/one" in capsys.readouterr().out


@pytest.mark.parametrize("code", [f'x = "{HARD}"', "x = 1  # Return the number of devices that the list has."])
def test_values_and_plain_prose_do_not_count(root, monkeypatch, code):
    (root / "gpu_plugin" / "one" / "file.py").write_text(code + "\n")
    assert run(monkeypatch) == 0


def test_text_of_a_document_counts_and_its_code_does_not(root, monkeypatch):
    document = root / "README.md"
    document.write_text(f"# {HARD}\n\nThe command `{HARD}` prints the list of devices.\n\n```\n{HARD}\n```\n")
    assert run(monkeypatch) == 0
    document.write_text(f"{HARD}\n")
    assert run(monkeypatch) == 1


def test_a_limit_goes_down_and_never_up(root, monkeypatch):
    limits = root / "limits.toml"
    limits.write_text('"README.md" = 30.0\n')
    (root / "README.md").write_text("The kubelet sends the list of the devices to the scheduler.\n")
    assert run(monkeypatch, "--lower") == 0
    assert '"README.md" = 0.0' in limits.read_text()
    (root / "README.md").write_text(f"{HARD}\n")
    assert run(monkeypatch, "--lower") == 1
    assert '"README.md" = 0.0' in limits.read_text()
