import re

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpu_plugin.config import values

BOUNDED = hypothesis_settings(max_examples=60, deadline=None)
UP_TO_A_DAY, SHORT = values.duration(0, 86400), values.duration(0.05, 3600)
CHOICE, CHOICES, ALONE = (
    values.choice("a", "b"),
    values.choices("a", "b", "c"),
    values.choices("a", "b", exclusive="auto"),
)


@pytest.mark.parametrize(
    ("reading", "each", "value"),
    [
        (values.boolean, ["1", "t", "T", "TRUE", "true", "True", True], True),
        (values.boolean, ["0", "f", "F", "FALSE", "false", "False", False], False),
        (values.boolean_or_auto, ["true", "1", True], True),
        (values.boolean_or_auto, ["F", False], False),
        (values.boolean_or_auto, ["auto"], "auto"),
        (UP_TO_A_DAY, ["200ms", ".2s"], 0.2),
        (UP_TO_A_DAY, ["5m", "300s", " 5m ", "4m59s1000ms"], 300.0),
        (UP_TO_A_DAY, ["1h30m", "1.5h"], 5400.0),
        (UP_TO_A_DAY, ["1m0.5s"], 60.5),
        (UP_TO_A_DAY, ["0s", "0h"], 0.0),
        (UP_TO_A_DAY, ["24h"], 86400.0),
        (SHORT, ["50ms"], 0.05),
        (SHORT, ["1h", "60m", "3600s"], 3600),
        (values.texts, ["a,b", " a , b ", "a,,b,", ["a", " b "], ("a", "b")], ("a", "b")),
        (values.texts, ["", ",", []], ()),
        (values.texts, [["a,b"]], ("a,b",)),
        (CHOICE, ["a"], "a"),
        (CHOICES, ["c,a,c", ["c", "a"]], ("c", "a")),
        (CHOICES, [["b", "b"], "b"], ("b",)),
        (ALONE, ["auto", ["auto"], " auto,, auto"], ("auto",)),
        (ALONE, ["b,a"], ("b", "a")),
        (values.imex_channels, ["", []], ()),
        (values.imex_channels, ["0", 0, ["0"], " 0 ,", ["0 "], [" 0"]], (0,)),
        (values.imex_channels, ["auto"], "auto"),
        (values.optional_path, [""], ""),
        (values.optional_path, ["/dev"], "/dev"),
        (values.root, ["", "/./././"], "/"),
        (values.optional_root, [""], ""),
        (values.listen_address, [""], ""),
        (values.host_names, ["", []], ()),
        (values.host_names, ["GPUS.example.com, *.b.c,gpus.example.com.,n_7"], ("gpus.example.com", "*.b.c", "n_7")),
    ],
)
def test_what_is_read(reading, each, value):
    for written in each:
        assert reading(written) == value, written


@pytest.mark.parametrize(
    ("reading", "each", "reason"),
    [
        (
            values.boolean,
            ["", "yes", "on", "tRUE", "y", " true", "2", 1, 0, 1.0, None, ["true"], {}],
            "neither true nor false",
        ),
        (values.boolean_or_auto, ["", "Auto", "AUTO", ["auto"], None, 2], "neither true nor false nor auto"),
        (
            UP_TO_A_DAY,
            ["", "5", 5, 5.0, True, None, "s", "5 s", "-5s", "5d", "5s5", "1e3s", "1..5s", ["5s"], {}],
            "a duration",
        ),
        (SHORT, ["49ms", "61m", "0s", "9" * 400 + "h"], "between 50ms and 1h"),
        (values.texts, [3, None, {"a": 1}, ["a", 3], [["a"]]], "text"),
        (CHOICE, ["c", "", "a,b", None, ["a"], {"a": 1}, 1], "one of a, b"),
        (CHOICES, ["a,x", "A"], "one of a, b, c"),
        (CHOICES, ["", []], "at least one of a, b, c"),
        (CHOICES, [["a", 1]], "text"),
        (ALONE, ["auto,a", ["b", "auto", "a"], "a,auto,a"], "excludes the others: leave it out, or leave out"),
        (ALONE, ["x"], "one of a, b, auto"),
        (
            values.imex_channels,
            ["x", "1.5", True, [True], [1.5], ["x"], [None], [[0]], "9" * 5000 + "x"],
            "a whole number",
        ),
        (values.imex_channels, ["1", [1], [0, 0], "0,1", -1], "channel IDs must be [] or [0], not ["),
        (values.path, ["", "a/b", "./x", "~", 1, None, ["/"], "/a\nb", "/a\n", "/a\0b"], "an absolute path"),
        (values.optional_path, ["dev"], "an absolute path"),
        (values.optional_root, ["dev"], "an absolute path"),
        (values.label_key, ["a b", "a/", "x" * 64], "not 1 to 63 letters"),
        (values.label_key, ["/a", "A/a"], "not a lower-case DNS name"),
        (
            values.host_names,
            ["http://gpus.example.com", "gpus:9480", "*", "*.", "a.*.b", "a b", "[::1]", "x" * 254, "ä"],
            "the name of a host",
        ),
        (values.listen_address, ["9480", "a", "a:", "a:http", "a:\uff19\uff14", "a:123456", "[::1]", " "], "HOST:PORT"),
        (values.listen_address, ["127.0.0.1:0", "127.0.0.1:65536"], "the port must be between 1 and 65535"),
        (
            values.listen_address,
            [
                "a..b:9480",
                "node..:9480",
                f"{'x' * 64}:1",
                f"a.{'x' * 64}.b:1",
                "a-.b:1",
                "local host:80",
                "$(IP):80",
                "*:80",
            ],
            "neither an address nor the name of a host",
        ),
        (
            values.listen_address,
            ["[]:80", "[127.0.0.1]:80", "fd00::7::9480", "127.0.0.1:80:80", "http://localhost:80"],
            "an IPv6 address",
        ),
        (values.listen_address, ["a\n:80", 9480, None], "text in one line"),
    ],
)
def test_what_is_refused(reading, each, reason):
    for written in each:
        with pytest.raises(ValueError, match=re.escape(reason)):
            reading(written)


@BOUNDED
@given(st.integers(0, 10**8))
def test_a_duration_that_is_spelt_out_is_read_back(milliseconds):
    spelt = values.spell_duration(milliseconds / 1000)
    assert values.duration(0, 10**6)(spelt) == pytest.approx(milliseconds / 1000, rel=1e-4)


@pytest.mark.parametrize(
    ("written", "host", "port"),
    [
        ("127.0.0.1:9480", "127.0.0.1", 9480),
        ("[fd00::7]:9480", "fd00::7", 9480),
        ("fd00::7:9480", "fd00::7", 9480),
        ("::1:80", "::1", 80),
        (":::80", "::", 80),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("localhost:65535", "localhost", 65535),
        ("node-7.example.com.:9480", "node-7.example.com.", 9480),
        (f"{'x' * 63}.b:9480", f"{'x' * 63}.b", 9480),
        (":9480", "", 9480),
    ],
)
def test_an_address_to_listen_on(written, host, port):
    assert values.listen_address(written) == written
    assert values.host_and_port(written) == (host, port)


def test_a_root_is_read_without_needless_slashes_and_dots():
    roots = {
        "/a//b": "/a/b",
        "//a": "/a",
        "/a/./b/.": "/a/b/",
        "/a/.b/..c/": "/a/.b/..c/",
        "/a/../b": "/a/../b",  # a link may lead to a directory with another parent
    }
    for written, read in roots.items():
        assert values.root(written) == values.optional_root(written) == read
