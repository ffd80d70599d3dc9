"""How many connections there may be under a limit on descriptors."""

import resource

import pytest

from gpu_plugin.telemetry.listener.listener import WANTED_DESCRIPTORS, connections

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "most"),
    [
        (256, 1024, 1024, 32),
        (1024, 1_048_576, WANTED_DESCRIPTORS, 32),
        (1024, INFINITE, WANTED_DESCRIPTORS, 32),
        (65536, 1_048_576, 65536, 32),
        (100, 200, 200, 25),
        (64, 64, 64, 8),
        (8, 8, 8, 2),
        (INFINITE, INFINITE, INFINITE, 32),
    ],
)
def test_the_limit_is_raised_and_connections_take_an_eighth_of_it_at_most(monkeypatch, soft, hard, wanted, most):
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert connections() == connections() == most
    assert limits[-1] == (wanted, hard)
    assert len(limits) <= 2
