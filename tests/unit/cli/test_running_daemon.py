"""What every verb has in common that talks to the running daemon."""

import json
import os
import subprocess
import sys

import pytest

VERBS = ["status", "events", "explain", "cordon 0", "uncordon 0", "topology", "fault --gpu 0 --lost"]

AS_NOBODY = """
import json, os, sys
from gpu_plugin.cli import main
state, verbs = sys.argv[1], sys.argv[2:]
def statuses():
    return [main([*verb.split(), "--state-dir", state]) for verb in verbs]
statuses()  # all modules are imported while they can be: an interpreter of root's own is closed to others
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print("as nobody", file=sys.stderr)
print(json.dumps(statuses()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_who_may_not_talk_to_the_daemon_is_told_so_in_one_sentence_by_every_verb(short_path):
    short_path.chmod(0o755)
    state = short_path / "state"
    state.mkdir(mode=0o700)
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, state, *VERBS], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [3] * len(VERBS)
    told = done.stderr.partition("as nobody\n")[2].splitlines()
    assert len(told) == len(VERBS)
    assert all(f"{state}/control.sock: permission denied: only root and the daemon's user" in line for line in told)
