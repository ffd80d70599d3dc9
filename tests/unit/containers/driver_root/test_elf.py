import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.containers.driver_root import elf
from gpu_plugin.simulation.driver_files import shared_library

GOOD = shared_library("libcuda.so.1", "x86_64")
PHNUM, PHENTSIZE, SHOFF, SHENTSIZE, SHNUM = 56, 54, 40, 58, 60
LOAD, DYNAMIC = 64, 64 + 56  # where the two program headers begin
FILE_SIZE, OFFSET = 32, 8
STRINGS = DYNAMIC + 56
TAGS = (STRINGS + len(b"\0libcuda.so.1\0") + 7) & ~7


def with_bytes(at: int, *values: int, form: str = "<Q", content: bytes = GOOD) -> bytes:
    new = b"".join(struct.pack(form, value) for value in values)
    return content[:at] + new + content[at + len(new) :]


@pytest.fixture
def reading(tmp_path):
    file = tmp_path / "library"

    def read(content: bytes) -> elf.SharedLibrary:
        file.write_bytes(content)
        return elf.read(str(file))

    return read


@pytest.mark.parametrize(
    ("uname", "machine"), [("x86_64", "EM_X86_64"), ("aarch64", "EM_AARCH64")], ids=["x86_64", "aarch64"]
)
def test_a_library_says_its_soname_and_its_processor(reading, uname, machine):
    assert reading(shared_library("libcuda.so.1", uname)) == elf.SharedLibrary("libcuda.so.1", machine, 64)
    assert reading(shared_library("", uname)) == elf.SharedLibrary("", machine, 64)


@pytest.mark.parametrize(("form", "order", "machine"), [("<", 1, 3), (">", 2, 20)], ids=["i386", "powerpc"])
def test_a_library_of_32_bits_in_either_byte_order(reading, form, order, machine):
    strings = b"\0libcuda.so.1\0"
    header, program = struct.calcsize("<16sHHIIIIIHHHHHH"), struct.calcsize("<8I")
    at = header + 2 * program
    tags = b"".join(struct.pack(f"{form}iI", *tag) for tag in [(14, 1), (5, at + 0x1000), (0, 0)])
    size = at + len(strings) + len(tags)
    content = struct.pack(
        f"{form}16sHHIIIIIHHHHHH",
        bytes([0x7F, *b"ELF", 1, order, 1]),
        *(3, machine, 1, 0, header, 0, 0, header, program, 2, 0, 0, 0),
    )
    content += struct.pack(f"{form}8I", 1, 0, 0x1000, 0x1000, size, size, 4, 0x1000)
    content += struct.pack(f"{form}8I", 2, at + len(strings), 0, 0, len(tags), len(tags), 4, 8)
    library = reading(content + strings + tags)
    assert (library.soname, library.bits) == ("libcuda.so.1", 32)


def test_the_python_that_runs_this_reads_as_its_own_loader_does(reading):
    with Path("/proc/self/maps").open(encoding="utf-8") as maps:
        libc = next(line.split()[-1] for line in maps if "/libc.so" in line or "/libc-" in line)
    read = elf.read(libc)
    assert read.soname == "libc.so.6"
    assert read.machine == {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[os.uname().machine]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an ELF file"),
        (b"\x7fELF", "not an ELF file"),
        (b"#!/bin/sh\n", "not an ELF file"),
        (GOOD[:40], "not an ELF file"),
        (GOOD[:80], "damaged"),
        (with_bytes(PHNUM, 0, form="<H"), "not a shared library"),
        (with_bytes(16, 1, form="<H"), "not a shared library"),  # an object file
        (with_bytes(16, 2, form="<H"), "not a shared library"),  # a program
        (with_bytes(PHNUM, 0xFFFF, form="<H"), "65535 program headers"),
        (with_bytes(DYNAMIC + OFFSET, 1 << 62), "damaged"),
        (with_bytes(DYNAMIC + OFFSET, (1 << 64) - 1), "damaged"),
        (with_bytes(TAGS + 2 * 16 + 8, 1 << 40), "damaged"),  # a name far outside
        (with_bytes(TAGS + 8, 1 << 63), "damaged"),  # a table of strings far outside
        (with_bytes(LOAD + FILE_SIZE, 64), "damaged"),  # a table of strings outside of the loaded parts
        (with_bytes(TAGS, 99, form="<q"), "damaged"),  # a name and no table of strings
        (shared_library("../../etc/passwd"), "not a file name"),
        (shared_library(".."), "not a file name"),
        (shared_library("lib\ncuda.so.1"), "not a file name"),
        (GOOD.replace(b"libcuda.so.1", b"libcud\xff.so.1"), "damaged"),
    ],
)
def test_what_is_no_shared_library_or_a_damaged_one_says_so(reading, content, words):
    with pytest.raises(ValueError, match=words):
        reading(content)


def test_section_headers_are_never_followed(reading):
    # 2^64 - 1 section headers, all of them at one place: a reader that looks for .dynstr there never comes back.
    content = with_bytes(SHOFF, 0)
    content = with_bytes(SHENTSIZE, 0, 0, 0, form="<H", content=content)
    content = with_bytes(TAGS, 99, form="<q", content=content)  # no DT_STRTAB
    with pytest.raises(ValueError, match="damaged"):
        reading(content)


def test_a_large_hostile_file_costs_neither_time_nor_memory(tmp_path):
    """Gigabytes of entries without an end, then of a name without one: both without a byte of zero before them."""
    endless = tmp_path / "tags"
    size = 1 << 40
    content = with_bytes(DYNAMIC + FILE_SIZE, size)
    with endless.open("wb") as file:
        file.write(content[:TAGS])
        for _ in range(8):
            file.write(b"\x70" * (1 << 20))
        file.truncate(size)
    name = tmp_path / "name"
    with name.open("wb") as file:
        content = with_bytes(LOAD + FILE_SIZE, size)
        file.write(with_bytes(TAGS + 2 * 16 + 8, len(content) - STRINGS, content=content))
        for _ in range(8):
            file.write(b"\x70" * (1 << 20))
        file.truncate(size)
    elf.read.__module__  # noqa: B018 - imports are over before memory is counted
    tracemalloc.start()
    try:
        for file in (endless, name):
            with pytest.raises(ValueError, match="damaged"):
                elf.read(str(file))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="it is a named pipe"):
        elf.read(str(tmp_path / "fifo"))
    with pytest.raises((ValueError, OSError)):
        elf.read(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        elf.read(str(tmp_path / "nothing"))


@given(
    changes=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=12),
    length=st.integers(0, len(GOOD) + 64),
)
def test_any_change_of_a_library_is_read_or_refused(tmp_path_factory, changes, length):
    content = bytearray(GOOD)
    for at, value in changes:
        content[at] = value
    refused_or_read(tmp_path_factory, bytes(content[:length]))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [16, 18, 32, 40, 52, 54, 56, 58, 60, 62, *range(LOAD, TAGS, 8), *range(TAGS, len(GOOD), 8)]
            ),
            st.sampled_from([0, 1, 2, 6, 0xFFFF, 0xFFFFFFFF, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]),
        ),
        max_size=6,
    )
)
def test_hostile_numbers_in_any_header_are_read_or_refused(tmp_path_factory, changes):
    content = GOOD
    for at, value in changes:
        form = "<H" if 52 <= at < 64 or at in (16, 18) else "<Q"
        content = with_bytes(at, value & (0xFFFF if form == "<H" else (1 << 64) - 1), form=form, content=content)
    refused_or_read(tmp_path_factory, content[: len(GOOD)])


def refused_or_read(tmp_path_factory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "hostile"
    file.write_bytes(content)
    try:
        library = elf.read(str(file))
    except (ValueError, OSError):
        return
    assert "/" not in library.soname
    assert library.bits in (32, 64)
