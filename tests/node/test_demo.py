"""The demo shows what it says, or fails."""

import io

from demo import play
from demo.daemon_process import daemon_process


def test_every_step_of_the_demo_happens():
    out = io.StringIO()
    assert play.run(out) == 0, out.getvalue()
    assert "All 13 steps happened" in out.getvalue()
    assert "Breaches of the kubelet's contract: 0" in out.getvalue()


def test_a_daemon_that_cannot_start_makes_the_demo_fail_with_its_log(monkeypatch):
    monkeypatch.setattr(
        play, "daemon_process", lambda flags, wake: daemon_process({**flags, "mig-strategy": "odd"}, wake)
    )
    out = io.StringIO()
    assert play.run(out) != 0
    assert "--mig-strategy: 'odd' is not one of" in out.getvalue()
