"""Names that the status page is shown under."""

import pytest

from gpu_plugin.telemetry.listener.status_page import known_host

NAMES = ("gpus.example.com", "*.nodes.example.com", "node-7")
OURS = (
    *("127.0.0.1", "127.0.0.1:9480", "10.0.0.7:9480", "localhost", "LocalHost:9480", "localhost.:9480", ""),
    *("[::1]:9480", "[fe80::1%25eth0]:9480", "[fe80::1%eth0]", "[fd00::7]"),
    *("gpus.example.com", "GPUS.example.com:9480", "gpus.example.com.:80", "node-7:9480"),
    *("node-3.nodes.example.com", "a.b.nodes.example.com:9480"),
)
FOREIGN = (
    *("evil.example", "127.0.0.1.evil.example:9480", "localhost.evil.example", "evil.localhost.example:9480"),
    *("gpus.example.com.evil.example", "evilnodes.example.com", "nodes.example.com"),
    *("[evil.example]:9480", "[evil.example%25eth0]", "[::1", "127.0.0.1:9480:1", "127.0.0.1, evil.example"),
    *("127.0.0.1@evil.example", "*.nodes.example.com.evil.example", "127.0.0.1\xff", "0x7f.1"),
)


@pytest.mark.parametrize("header", OURS)
def test_a_name_that_no_other_site_can_have(header):
    assert known_host(header, NAMES)


@pytest.mark.parametrize("header", FOREIGN)
def test_a_name_that_another_site_may_have(header):
    assert not known_host(header, NAMES)
    assert not known_host(header, ())
