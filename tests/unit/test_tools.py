"""What `make e2e` installs before its tests: every installation is tried, and what cannot be had is named."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests import tools
from tests.chart import openapi, prometheus
from tests.cluster.harness import binaries
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


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), subprocess.TimeoutExpired("apt-get", 300)])
def test_a_full_disk_or_a_hanging_command_is_one_thing_that_cannot_be_had(error):
    def fails(say):
        raise error

    done: list[object] = []
    (missing,) = tools.install_all((fails, done.append), lambda step: None)
    assert str(error) in missing
    assert len(done) == 1


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """A directory of commands, the first on the path, and an empty cache."""
    directory = tmp_path / "commands"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(binaries, "SYSTEM_PATH", (str(directory),))

    def write(name: str, *lines: str) -> None:
        program = directory / name
        program.write_text("\n".join(("#!/bin/sh -e", *lines, "")))
        program.chmod(0o755)

    return write


def test_two_runs_do_not_have_apt_at_work_at_once(commands, tmp_path):
    commands("apt-cache", "echo Package: podman")
    commands("apt-get", f"mkdir {tmp_path}/lists", "sleep 0.1", f"rmdir {tmp_path}/lists")
    with ThreadPoolExecutor(2) as runs:
        assert [*runs.map(binaries.install_packages, [[("podman",)], [("runc",)]])] == [None, None]


def test_what_another_run_fetched_meanwhile_is_not_fetched_again(commands, monkeypatch):
    commands("apt-get", "exit 1")
    commands("dpkg", "exit 1")
    locked = binaries.locked_cache

    @contextmanager
    def waited_for():
        with locked() as cache:  # the other run had the lock until now
            programs = cache / "prometheus-debian" / "usr" / "bin"
            programs.mkdir(parents=True)
            for name in ("prometheus", "promtool"):
                (programs / name).touch(mode=0o755)
            yield cache

    monkeypatch.setattr(binaries, "locked_cache", waited_for)
    assert prometheus.install(lambda step: None).tool.name == "promtool"


def test_the_schemas_of_another_checkout_stay(commands, tmp_path):
    swagger = tmp_path / "source" / "api" / "openapi-spec" / "swagger.json"
    swagger.parent.mkdir(parents=True)
    swagger.write_text('{"definitions": {}}')
    commands(
        "go",
        f"""case $1 in
      version) echo go version go1.25.0 linux/amd64 ;;
      mod) echo '{{"Dir": "{tmp_path}/source"}}' ;;
    esac""",
    )
    other = tmp_path / "gpu-plugin-e2e" / "schemas-v1.37.2-0123456789ab"
    other.mkdir(parents=True)
    assert openapi.install("v1.37.2", lambda step: None).is_dir()
    assert other.is_dir()
