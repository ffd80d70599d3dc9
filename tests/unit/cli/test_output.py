"""Output that cannot be written, interrupts, and the output of all faults of a configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_plugin.cli.output import displayable, table, wrapped
from gpu_plugin.state.log import EVENT
from tests.state_log import store

GPU_PLUGIN = [sys.executable, "-m", "gpu_plugin"]


def test_a_full_disk_is_a_sentence_and_an_exit_status_of_its_own():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*GPU_PLUGIN, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr == (
        "gpu-plugin: the output could not be written: No space left on device; the command itself has completed\n"
    )


def test_a_reader_that_leaves_is_no_failure():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*GPU_PLUGIN, "--help"], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("verb", "status"), [("--help", 4), ("events", 3)])
def test_output_that_was_closed_before_is_lost_and_no_trace(tmp_path, verb, status):
    store(tmp_path, EVENT, {"at": 1, "kind": "order", "text": "x"})
    environ = {**os.environ, "STATE_DIR": str(tmp_path)}
    command = ["sh", "-c", '"$@" >&-', "sh", *GPU_PLUGIN, verb]
    done = subprocess.run(command, capture_output=True, check=False, env=environ, stdin=subprocess.DEVNULL)
    assert done.returncode == status
    assert done.stderr.endswith(b"could not be written: Bad file descriptor; the command itself has completed\n")


@pytest.mark.parametrize("how", ['"$@" 2>/dev/full', '"$@" 2>&-'])
@pytest.mark.parametrize(("verb", "status"), [(["status"], 3), (["status", "--nonsense"], 2), (["events"], 3)])
def test_an_exit_status_is_the_same_whether_or_not_an_error_can_be_said(tmp_path, how, verb, status):
    environ = {**os.environ, "STATE_DIR": str(tmp_path)}
    done = subprocess.run(["sh", "-c", how, "sh", *GPU_PLUGIN, *verb], stdout=subprocess.PIPE, check=False, env=environ)
    assert (done.returncode, done.stdout) == (status, b"")


def test_what_had_nothing_to_say_loses_nothing_by_a_closed_output(tmp_path):
    code = "import sys; from gpu_plugin import cli; from gpu_plugin.cli.orders import COMMANDS; "
    code += "COMMANDS['cordon'].callback = lambda **_: 0; sys.exit(cli.main(['cordon', '0']))"
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_opened_takes_no_number_of_a_standard_stream():
    code = "import os, sys; from gpu_plugin import __main__, cli; "
    code += "cli.main = lambda: os.open('/etc/hostname', os.O_RDONLY); sys.exit(__main__.main())"
    done = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], check=False)
    assert done.returncode > 2


def test_what_is_told_reaches_no_terminal_as_more_than_text():
    told = {"a": ["x\x1b[2J", 1, None, {"b\n": "\udcff"}]}
    assert displayable(told) == {"a": ["x\\x1b[2J", 1, None, {"b\\n": "\\udcff"}]}


@pytest.mark.parametrize("module", ["click", "gpu_plugin.cli", "gpu_plugin.cli.status"])
def test_an_interrupt_is_no_trace_however_early_it_comes(module):
    code = (
        "import sys, importlib.abc\n"
        "class Interrupted(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from gpu_plugin.__main__ import main\n"
        "sys.argv = ['gpu-plugin', 'status']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, b"")


@pytest.mark.parametrize("moment", ["import gpu_plugin.cli", "cli.main", "exit"])
def test_an_interrupt_by_signal_is_no_trace_either(moment):
    code = (
        "import sys, os, signal, atexit, importlib.abc\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job's children ignore it
        "def interrupt(): os.kill(os.getpid(), signal.SIGINT)\n"
        "class Interrupted(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if {moment!r} == 'import ' + name:\n"
        "            try: interrupt()\n"
        "            except KeyboardInterrupt: pass\n"  # as a callback that cannot pass it on
        "sys.meta_path.insert(0, Interrupted())\n"
        "from gpu_plugin import __main__\n"
        f"if {moment!r} == 'cli.main':\n"
        "    from gpu_plugin import cli\n"
        "    cli.main = interrupt\n"
        f"if {moment!r} == 'exit': atexit.register(interrupt)\n"
        "sys.argv = ['gpu-plugin', '--version']\n"
        "sys.exit(__main__.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0 if moment == "exit" else 130, b"")


def test_every_fault_of_a_configuration_is_a_line(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("version: v1\nflagz: 1\nflags: {migStrategy: some}\nselektion: {}\n")
    done = subprocess.run([*GPU_PLUGIN, "run", "--config-file", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    told = done.stderr.splitlines()
    assert [line.split(": ")[1] for line in told] == [f"{file}:2", f"{file}:3", f"{file}:4"]


def test_durations_and_paths_are_called_so_in_help():
    done = subprocess.run(
        [*GPU_PLUGIN, "run", "--help"], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"}
    )
    assert "--health-poll-interval DURATION" in done.stdout
    assert "--state-dir PATH" in done.stdout
    assert done.stdout.index("GPUs:\n") < done.stdout.index("--mig-strategy") < done.stdout.index("Health:\n")


def test_a_text_is_broken_between_words_and_a_word_never():
    assert list(wrapped("one two three four five six", "  ", 24)) == ["one two three four five", "  six"]
    assert list(wrapped("one two", "  ", None)) == ["one two"]
    assert list(wrapped("GPU-8c155fe2-a352", "", 5)) == ["GPU-8c155fe2-a352"]


def test_a_table_has_columns_and_ends_where_the_terminal_does():
    rows = [["A", "BB"], ["1", "two"], ["10", ""]]
    assert table(rows) == ["A   BB", "1   two", "10"]
    assert table(rows, 6) == ["A   BB", "1  ...", "10"]


def test_a_column_that_matters_less_is_cut_before_one_that_matters_more():
    rows = [["MODEL", "STATE"], ["NVIDIA H100", "Healthy"]]
    assert table(rows, 18, (0,)) == ["MODEL      STATE", "NVIDIA...  Healthy"]
    assert table(rows, 14, (0,)) == ["MODEL  STATE", "NV...  Healthy"]
    assert table(rows, 20, (0,)) == table(rows)
