import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpu_plugin.config import values

BOUNDED = hypothesis_settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("written", ["1", "t", "T", "TRUE", "true", "True", True])
def test_what_go_reads_as_true_is_true(written):
    assert values.boolean(written) is True


@pytest.mark.parametrize("written", ["0", "f", "F", "FALSE", "false", "False", False])
def test_what_go_reads_as_false_is_false(written):
    assert values.boolean(written) is False


@pytest.mark.parametrize(
    "written", ["", "yes", "no", "on", "off", "tRUE", "y", " true", "2", 1, 0, 1.0, None, [], ["true"], {"true": 1}]
)
def test_nothing_else_is_true_or_false(written):
    with pytest.raises(ValueError, match="is neither true nor false"):
        values.boolean(written)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("200ms", 0.2),
        ("15s", 15.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1m0.5s", 60.5),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        (" 5s ", 5.0),
        ("0s", 0.0),
        ("24h", 86400.0),
    ],
)
def test_durations(written, seconds):
    assert values.duration(0, 86400)(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", ["", "5", 5, 5.0, True, None, "s", "5 s", "-5s", "5d", "5s5", "1e3s", "1..5s", "5s,", ["5s"], {"5s": 1}]
)
def test_what_is_no_duration(written):
    with pytest.raises(ValueError, match="is not a duration such as 200ms, 15s or 5m"):
        values.duration(0, 86400)(written)


@pytest.mark.parametrize("written", ["49ms", "61m", "0s", "9" * 400 + "h"])
def test_a_duration_beyond_its_limits_is_told_the_limits(written):
    with pytest.raises(ValueError, match="is not between 50ms and 1h"):
        values.duration(0.05, 3600)(written)


@pytest.mark.parametrize(("written", "seconds"), [("50ms", 0.05), ("1h", 3600), ("60m", 3600), ("3600s", 3600)])
def test_the_limits_of_a_duration_belong_to_it(written, seconds):
    assert values.duration(0.05, 3600)(written) == seconds


@BOUNDED
@given(st.integers(0, 10**8))
def test_a_duration_that_is_spelt_out_is_read_back(milliseconds):
    spelt = values.spell_duration(milliseconds / 1000)
    assert values.duration(0, 10**6)(spelt) == pytest.approx(milliseconds / 1000, rel=1e-4)


@pytest.mark.parametrize(
    ("written", "items"),
    [
        ("a,b", ("a", "b")),
        (" a , b ", ("a", "b")),
        ("a,,b,", ("a", "b")),
        ("", ()),
        (",", ()),
        (["a", " b "], ("a", "b")),
        (("a",), ("a",)),
        (["a,b"], ("a,b",)),
        ([], ()),
    ],
)
def test_text_split_at_commas_or_a_list(written, items):
    assert values.texts(written) == items


@pytest.mark.parametrize("written", [3, None, {"a": 1}, ["a", 3], [["a"]]])
def test_what_is_no_list_of_texts(written):
    with pytest.raises(ValueError, match="is not text"):
        values.texts(written)


def test_choices_are_kept_in_order_and_each_once():
    assert values.choices("a", "b", "c")("c,a,c") == ("c", "a")
    assert values.choices("a", "b", "c")(["b", "b"]) == ("b",)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("a,x", "'x' is not one of a, b"),
        ("A", "'A' is not one of a, b"),
        ("", "needs at least one of a, b"),
        ([], "needs at least one of a, b"),
        (["a", 1], "1 is not text in one line"),
    ],
)
def test_choices_outside_what_is_allowed(written, reason):
    with pytest.raises(ValueError, match=f"^{reason}$"):
        values.choices("a", "b")(written)


@pytest.mark.parametrize("written", ["auto", ["auto"], " auto,, auto"])
def test_a_choice_that_stands_alone(written):
    assert values.choices("a", "b", exclusive="auto")(written) == ("auto",)
    assert values.choices("a", "b", exclusive="auto")("b,a") == ("b", "a")


@pytest.mark.parametrize("written", ["auto,a", ["b", "auto", "a"], "a,auto,a"])
def test_a_choice_that_stands_alone_is_not_combined(written):
    with pytest.raises(ValueError, match=r"^'auto' excludes the others: leave it out, or leave out (a|b, a)$"):
        values.choices("a", "b", exclusive="auto")(written)
    with pytest.raises(ValueError, match=r"^'x' is not one of a, b, auto$"):
        values.choices("a", "b", exclusive="auto")("x")


@pytest.mark.parametrize(("written", "value"), [("auto", "auto"), ("true", True), ("F", False), (True, True)])
def test_a_switch_may_be_left_to_the_node(written, value):
    assert values.boolean_or_auto(written) == value
    assert values.imex_channels("auto") == "auto"


@pytest.mark.parametrize("written", ["", "Auto", "AUTO", ["auto"], None, 2])
def test_what_is_no_switch_with_auto(written):
    with pytest.raises(ValueError, match=r"is neither true nor false nor auto$"):
        values.boolean_or_auto(written)


@pytest.mark.parametrize("written", ["c", "", "a,b", None, ["a"], {"a": 1}, 1])
def test_one_choice_outside_what_is_allowed(written):
    with pytest.raises(ValueError, match=r"is not one of a, b$"):
        values.choice("a", "b")(written)


@pytest.mark.parametrize("written", ["x", "1.5", True, [True], [1.5], ["x"], [None], [[0]], "9" * 5000 + "x"])
def test_what_is_no_whole_number(written):
    with pytest.raises(ValueError, match="is not a whole number"):
        values.imex_channels(written)


@pytest.mark.parametrize(
    ("written", "channels"),
    [("", ()), ([], ()), ("0", (0,)), (0, (0,)), (["0"], (0,)), (" 0 ,", (0,)), (["0 "], (0,)), ([" 0"], (0,))],
)
def test_imex_channels_are_none_or_the_first(written, channels):
    assert values.imex_channels(written) == channels


@pytest.mark.parametrize("written", ["1", [1], [0, 0], "0,1", -1])
def test_other_imex_channels_are_refused(written):
    with pytest.raises(ValueError, match=r"channel IDs must be \[\] or \[0\], not \["):
        values.imex_channels(written)


@pytest.mark.parametrize("written", ["", "relative/path", "./x", "~", 1, None, ["/"], "/a\nb", "/a\0b"])
def test_what_is_no_absolute_path(written):
    with pytest.raises(ValueError, match="is not an absolute path"):
        values.path(written)


def test_an_optional_path_may_be_nothing():
    assert values.optional_path("") == ""
    assert values.optional_path("/dev") == "/dev"
    with pytest.raises(ValueError, match="is not an absolute path"):
        values.optional_path("dev")


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


def test_no_address_to_listen_on_is_none():
    assert values.listen_address("") == ""


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("9480", "is not HOST:PORT, such as"),
        ("a..b:9480", "'a..b' is neither an address nor the name of a host"),
        ("node..:9480", "is neither an address nor the name of a host"),
        (f"{'x' * 64}:9480", "is neither an address nor the name of a host"),
        (f"a.{'x' * 64}.b:9480", "is neither an address nor the name of a host"),
        ("a-.b:9480", "is neither an address nor the name of a host"),
        ("127.0.0.1", "is not HOST:PORT, such as"),
        ("127.0.0.1:", "is not HOST:PORT, such as"),
        ("127.0.0.1:http", "is not HOST:PORT, such as"),
        ("127.0.0.1:９４８０", "is not HOST:PORT, such as"),  # noqa: RUF001 - digits, but not a port's
        ("127.0.0.1:123456", "is not HOST:PORT, such as"),
        ("[::1]", "is not HOST:PORT, such as"),
        (" ", "is not HOST:PORT, such as"),
        ("127.0.0.1:0", "the port must be between 1 and 65535"),
        ("127.0.0.1:65536", "the port must be between 1 and 65535"),
        ("[]:80", r"\[\] is not an IPv6 address"),
        ("[127.0.0.1]:80", "is not an IPv6 address"),
        ("fd00::7::9480", "is not an IPv6 address"),
        ("127.0.0.1:80:80", "is not an IPv6 address"),
        ("http://localhost:80", "is not an IPv6 address"),
        ("local host:80", "neither an address nor the name of a host"),
        ("$(POD_IP):80", "neither an address nor the name of a host"),
        ("*:80", "neither an address nor the name of a host"),
        ("a\n:80", "is not text in one line"),
        (9480, "is not text"),
        (None, "is not text"),
    ],
)
def test_what_is_no_address_to_listen_on(written, reason):
    with pytest.raises(ValueError, match=reason):
        values.listen_address(written)


def test_names_of_hosts_are_in_small_letters_and_each_once():
    written = "GPUS.example.com, *.nodes.example.com,gpus.example.com.,node_7"
    assert values.host_names(written) == ("gpus.example.com", "*.nodes.example.com", "node_7")
    assert values.host_names([]) == values.host_names("") == ()


@pytest.mark.parametrize(
    "written", ["http://gpus.example.com", "gpus:9480", "*", "*.", "a.*.b", "a b", "[::1]", "x" * 254, "ä"]
)
def test_what_is_no_name_of_a_host(written):
    with pytest.raises(ValueError, match="is not the name of a host"):
        values.host_names(written)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("/a//b", "/a/b"),
        ("//a", "/a"),
        ("/a/./b/.", "/a/b/"),
        ("/./././", "/"),
        ("/a/.b/..c/", "/a/.b/..c/"),
        ("/a/../b", "/a/../b"),  # the parent of what a link leads to may be another directory
    ],
)
def test_a_root_is_read_without_needless_slashes_and_dots(written, read):
    assert values.root(written) == values.optional_root(written) == read


def test_no_root_is_the_root_directory_or_none():
    assert (values.root(""), values.optional_root("")) == ("/", "")
    with pytest.raises(ValueError, match="is not an absolute path"):
        values.optional_root("dev")
