"""Reads the SONAME and the processor of a shared library. Imports pyelftools, which only CDI specifications need: 30 ms."""

import struct
from typing import Any

import msgspec
from elftools.common.exceptions import ELFError
from elftools.common.utils import struct_parse
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from gpu_plugin.runtime.regular_file import UnfitFileError, open_file

MAX_SEGMENTS = 256  # the most program headers of a library; a file that claims more is not a library
MAX_DYNAMIC_BYTES = 64 * 1024  # the most bytes of a dynamic table that are read; libraries have some 500
LONGEST_SONAME = 255  # bytes in the longest name of a file (NAME_MAX)

_DT_NULL = 0
_DT_STRTAB = 5
_DT_SONAME = 14


class SharedLibrary(msgspec.Struct, frozen=True):
    """A library's SONAME (empty if it has no SONAME), its processor by the ELF name, such as EM_X86_64, and 32 or 64 bits."""

    soname: str
    machine: str
    bits: int


def read(file: str) -> SharedLibrary:
    """Read the ELF headers of a library.

    Raises:
        ValueError: the file is not a shared library. The text says why.
        OSError: the file cannot be read.
    """
    try:
        stream = open_file(file)
    except UnfitFileError as error:
        raise ValueError(f"it {error.strerror}") from None
    with stream:
        try:
            elf = ELFFile(stream)
            return SharedLibrary(_soname(elf), str(elf["e_machine"]), int(elf.elfclass))
        except ELFError as error:
            raise ValueError(f"it is not an ELF file ({error})") from None
        except (ConstructError, ArithmeticError, AssertionError, LookupError, TypeError, UnicodeDecodeError) as error:
            # pyelftools raises these on a file that only begins as ELF, and the functions below raise some of them.
            raise ValueError(f"its ELF headers are damaged ({error})") from None


def _soname(elf: ELFFile) -> str:
    # Only the headers of pyelftools are used: its dynamic segments follow tables without an end, and sections at any offset.
    segments = _segments(elf)
    dynamic = next((each for each in segments if each["p_type"] == "PT_DYNAMIC"), None)
    if dynamic is None or elf["e_type"] != "ET_DYN":
        raise ValueError("it is an ELF file, but not a shared library")
    tags = _tags(elf, dynamic)
    if _DT_SONAME not in tags:
        return ""
    if _DT_STRTAB not in tags:
        raise LookupError("no table of names")
    address = tags[_DT_STRTAB] + tags[_DT_SONAME]
    for each in segments:
        if each["p_type"] == "PT_LOAD" and 0 <= address - each["p_vaddr"] < each["p_filesz"]:
            at = each["p_offset"] + address - each["p_vaddr"]
            name, end, _ = _bytes(elf, at, LONGEST_SONAME + 1).partition(b"\0")
            if not end:
                raise LookupError("its SONAME has no end")
            return _file_name(name.decode())
    raise LookupError("its SONAME is outside of the loaded segments")


def _segments(elf: ELFFile) -> list[Any]:
    count = int(elf["e_phnum"])
    if count > MAX_SEGMENTS:
        raise ValueError(f"it claims {count} program headers")
    start, size = elf["e_phoff"], elf["e_phentsize"]
    if start + count * size > elf.stream_len:
        raise LookupError("its program headers are outside of the file")
    return [struct_parse(elf.structs.Elf_Phdr, elf.stream, stream_pos=start + at * size) for at in range(count)]


def _tags(elf: ELFFile, dynamic: Any) -> dict[int, int]:
    entry = struct.Struct(("<" if elf.little_endian else ">") + ("qQ" if elf.elfclass == 64 else "iI"))
    table = _bytes(elf, dynamic["p_offset"], min(dynamic["p_filesz"], MAX_DYNAMIC_BYTES))
    tags: dict[int, int] = {}
    for tag, value in entry.iter_unpack(table[: len(table) // entry.size * entry.size]):
        if tag == _DT_NULL:
            return tags
        tags.setdefault(tag, value)
    raise LookupError("its dynamic table has no end")


def _bytes(elf: ELFFile, at: int, most: int) -> bytes:
    """Return up to `most` bytes of the file from this offset."""
    if at >= elf.stream_len:
        raise LookupError("a table is outside of the file")
    elf.stream.seek(at)
    content: bytes = elf.stream.read(most)
    return content


def _file_name(soname: str) -> str:
    if "/" in soname or soname in (".", "..") or not soname.isprintable():
        raise ValueError(f"its SONAME {soname!r} is not a file name")
    return soname
