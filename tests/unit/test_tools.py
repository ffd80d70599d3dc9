"""What `make e2e` installs before its tests: every installation is tried, and what cannot be had is named."""

import pytest

from tests import tools
from tests.cluster.harness.binaries import MissingError
from tests.needed import found


def lacking(name):
    def install(say):
        say(f"building {name}")
        raise MissingError(f"{name}: there is no compiler")

    return install


def test_one_thing_that_cannot_be_had_leaves_out_no_other():
    steps: list[str] = []
    done: list[object] = []
    installs = (lacking("first"), done.append, lacking("second"))
    missing = tools.install_all(installs, steps.append)
    assert missing == ["first: there is no compiler", "second: there is no compiler"]
    assert steps == ["building first", "building second"]
    assert len(done) == 1


@pytest.mark.parametrize(("install", "required", "tried", "status"), [
    ("", "", False, 0), ("1", "", True, 0), ("1", "required", True, 1), ("", "required", False, 0),
])  # fmt: skip
def test_a_lack_is_a_failure_only_if_everything_is_required(monkeypatch, capsys, install, required, tried, status):
    monkeypatch.setattr(tools, "INSTALLS", (lacking("helm"),))
    monkeypatch.setenv("E2E_INSTALL", install)
    monkeypatch.setenv("E2E", required)
    assert tools.main() == status
    assert ("helm: there is no compiler" in capsys.readouterr().err) is tried


def test_a_test_that_lacks_something_is_skipped_and_says_how_to_install_it(monkeypatch):
    def find():
        raise MissingError("not on this machine: helm")

    monkeypatch.setattr("tests.needed.REQUIRED", False)
    with pytest.raises(pytest.skip.Exception, match=r"helm.*E2E_INSTALL=1 make e2e"):
        found(find)
    monkeypatch.setattr("tests.needed.REQUIRED", True)
    with pytest.raises(pytest.fail.Exception, match="helm"):
        found(find)
    assert found(lambda: 7) == 7
