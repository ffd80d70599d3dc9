"""How many connections there may be under a limit on descriptors."""

import resource
import subprocess
import sys

import pytest

from gpu_plugin.telemetry.listener.sockets import WANTED_DESCRIPTORS, connections, limit

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (256, 1024, 1024),
        (1024, 1_048_576, WANTED_DESCRIPTORS),
        (1024, INFINITE, WANTED_DESCRIPTORS),
        (65536, 1_048_576, 65536),
        (64, 64, 64),
        (INFINITE, INFINITE, INFINITE),
    ],
)
def test_the_limit_is_raised_as_far_as_it_is_of_use_and_never_lowered(soft, hard, wanted):
    assert limit(soft, hard) == wanted


@pytest.mark.parametrize(("soft", "there_may_be"), [(4096, 32), (256, 32), (128, 16), (64, 8), (8, 2), (INFINITE, 32)])
def test_connections_take_an_eighth_of_the_descriptors_at_most(soft, there_may_be):
    assert connections(soft) == there_may_be


def test_the_process_asks_for_what_it_may_have():
    told = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200)); "
        "from gpu_plugin.telemetry.listener.sockets import allowed; "
        "print(allowed(), allowed(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["200", "200", "200", "200"]
