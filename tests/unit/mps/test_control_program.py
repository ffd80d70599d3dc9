import re
import time
from pathlib import Path

import pytest

from gpu_plugin.mps.control_program import PROGRAM, answer_of, find_program, start_client
from gpu_plugin.mps.errors import MpsError, NotStartedError
from gpu_plugin.mps.limits import GET_THREADS


def ask(control, pipe, command, patience):
    return answer_of(start_client(control, {"CUDA_MPS_PIPE_DIRECTORY": pipe}), command, patience)


def program(directory, text=""):
    directory.mkdir(parents=True)
    made = directory / PROGRAM
    made.write_text(f"#!/bin/sh\n{text}\n")
    made.chmod(0o755)
    return str(made)


def test_the_control_program_of_the_driver_root_comes_first(tmp_path):
    ours, theirs = program(tmp_path / "root/usr/bin"), program(tmp_path / "bin")
    roots = (str(tmp_path / "absent"), f"{tmp_path}/root/", "/")
    assert find_program(roots, str(tmp_path / "bin")) == ours
    Path(ours).chmod(0o644)
    assert find_program(roots, str(tmp_path / "bin")) == theirs
    Path(ours).unlink()
    Path(ours).mkdir()  # as a hostPath volume without a type makes one where there is no file
    assert find_program(roots, str(tmp_path / "bin")) == theirs


def test_where_there_is_no_control_program_every_place_looked_at_is_named(tmp_path):
    place = re.escape(f"no {PROGRAM} at {tmp_path}/usr/bin/{PROGRAM}, $PATH; ")
    with pytest.raises(MpsError, match=f"{place}.* utilities, or name it$"):
        find_program((str(tmp_path), "/"), str(tmp_path), ", or name it")


def test_a_daemon_is_asked_in_its_pipe_directory_and_answers_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    control = program(tmp_path / "bin", 'cat; echo "$CUDA_MPS_PIPE_DIRECTORY ${CUDA_VISIBLE_DEVICES-none}"')
    assert ask((control,), "/run/pipe", "some command", 10) == "some command /run/pipe none"


def test_no_daemon_no_answer_and_no_program_are_told_apart(tmp_path):
    absent = program(tmp_path / "absent", "echo Cannot find MPS control daemon process; exit 1")
    with pytest.raises(MpsError, match="with status 1: Cannot find MPS control daemon process"):
        ask((absent,), "/run/pipe", GET_THREADS, 10)
    silent = program(tmp_path / "silent", "exec sleep 600")
    began = time.monotonic()
    with pytest.raises(MpsError, match=r"has not answered 'get_default_active_thread_percentage' for 0\.2 s"):
        ask((silent,), "/run/pipe", GET_THREADS, 0.2)
    assert time.monotonic() - began < 10
    with pytest.raises(NotStartedError, match=r"/nowhere cannot be started: No such file"):
        ask(("/nowhere",), "/run/pipe", GET_THREADS, 10)


def test_an_answer_without_end_is_cut_off(tmp_path):
    endless = program(tmp_path / "endless", "exec yes")
    assert len(ask((endless,), "/run/pipe", GET_THREADS, 10)) == 1000
