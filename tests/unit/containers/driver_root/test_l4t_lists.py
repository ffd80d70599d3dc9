import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.containers.driver_root.tegra import MAX_LINES, Entry, Line, parse

NAME = "/etc/lists/drivers.csv"


def test_lines_comments_and_blanks_are_told_apart():
    text = """\
# Linux for Tegra

dev, /dev/nvhost-ctrl-pva0
 dev ,/dev/dri/card*\r
lib,  /usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1
sym, /usr/lib/aarch64-linux-gnu/libcuda.so
dir,\t/lib//firmware/./tegra23x/
  # indented
lib, /a/path,with,commas
lib, /a/path,with,commas
"""
    assert parse(NAME, text.encode()) == ((
        Line(Entry.DEVICE, "/dev/nvhost-ctrl-pva0"),
        Line(Entry.DEVICE, "/dev/dri/card*"),
        Line(Entry.LIBRARY, "/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1"),
        Line(Entry.LINK, "/usr/lib/aarch64-linux-gnu/libcuda.so"),
        Line(Entry.DIRECTORY, "/lib/firmware/tegra23x"),
        Line(Entry.LIBRARY, "/a/path,with,commas"),
    ), ())  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("dev", "'dev' is not of the form `kind, path`"),
        (",", "'' is not one of dev, lib, dir, sym"),
        ("file, /a", "'file' is not one of dev, lib, dir, sym"),
        ("DEV, /a", "'DEV' is not one of dev, lib, dir, sym"),
        ("dev,", "no absolute path"),
        ("lib, usr/lib/a.so", "no absolute path"),
        ("lib, /a\x1bb", "no absolute path of printable characters"),
        ("lib, /a\x00b", "no absolute path of printable characters"),
        ("lib, /../../etc/shadow", "leads to the root or out of it"),
        ("dir, /", "leads to the root or out of it"),
        ("dir, //.//", "leads to the root or out of it"),
    ],
)
def test_each_line_that_is_none_is_said_with_its_place(line, why):
    lines, complaints = parse(NAME, f"lib, /good\n\n{line}\nlib, /better\n".encode())
    assert lines == (Line(Entry.LIBRARY, "/good"), Line(Entry.LIBRARY, "/better"))
    (complaint,) = complaints
    assert complaint.startswith(f"{NAME}:3 is left out: ")
    assert why in complaint


def test_bytes_that_are_no_text_are_no_path():
    lines, complaints = parse(NAME, b"lib, /a\xff\nlib, /b\n")
    assert lines == (Line(Entry.LIBRARY, "/b"),)
    assert len(complaints) == 1


def test_what_is_wrong_is_told_of_the_first_lines_and_counted_of_the_others():
    rows = ["lib, /a", *["junk"] * 30, *["#"] * (MAX_LINES - 31), "lib, /b"]
    lines, complaints = parse(NAME, "\n".join(rows).encode())
    assert lines == (Line(Entry.LIBRARY, "/a"),)
    assert len(complaints) == 22
    assert complaints[0].startswith(f"{NAME}:2 ")
    assert complaints[19].startswith(f"{NAME}:21 ")
    assert complaints[20:] == (
        f"{NAME}: 10 more lines are left out",
        f"{NAME} has 10,001 lines; the lines after the first 10,000 are left out",
    )
    lines, complaints = parse(NAME, "\n".join([*rows[-MAX_LINES:], ""]).encode())
    assert (lines, len(complaints)) == ((Line(Entry.LIBRARY, "/b"),), 21)


@given(st.binary(max_size=200))
def test_whatever_a_list_holds_its_lines_are_plain_absolute_paths(content):
    lines, complaints = parse(NAME, content)
    for line in lines:
        assert line.path.startswith("/")
        assert line.path.isprintable()
        assert not {"", ".", ".."} & set(line.path.split("/")[1:])
    assert all(complaint.isprintable() for complaint in complaints)
