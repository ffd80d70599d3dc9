"""What a shared library says of itself. Imports pyelftools, which only CDI specifications need: 30 ms."""

import os
import stat
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.common.utils import struct_parse
from elftools.construct import ConstructError
from elftools.elf.dynamic import Dynamic
from elftools.elf.elffile import ELFFile

MOST_SEGMENTS = 256
"""More program headers than any library has: a file that claims more is no library."""


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """A library's SONAME, empty where it has none; its processor as ELF has it, such as EM_X86_64; 32 or 64 bits."""

    soname: str
    machine: str
    bits: int


def read(file: str) -> SharedLibrary:
    """What the library in this file says of itself.

    Raises:
        ValueError: it is no shared library; the text says why.
        OSError: it cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        try:
            elf = ELFFile(stream)
            return SharedLibrary(_soname(elf), str(elf["e_machine"]), int(elf.elfclass))
        except ELFError as error:
            raise ValueError(f"it is no ELF file ({error})") from None
        except (ConstructError, ArithmeticError, LookupError, TypeError, UnicodeDecodeError) as error:
            # What pyelftools raises on a file that begins as ELF and goes on as something else.
            raise ValueError(f"its ELF headers are damaged ({error})") from None


def _soname(elf: ELFFile) -> str:
    count = int(elf["e_phnum"])
    if count > MOST_SEGMENTS:
        raise ValueError(f"it claims {count} program headers")
    # pyelftools' own segments read the section headers too, which takes twice as long for what is not needed here.
    for at in range(count):
        header = struct_parse(elf.structs.Elf_Phdr, elf.stream, stream_pos=elf["e_phoff"] + at * elf["e_phentsize"])
        if header["p_type"] == "PT_DYNAMIC":
            dynamic = Dynamic(elf.stream, elf, None, header["p_offset"], empty=False)
            tags = dynamic.iter_tags("DT_SONAME")
            return next((str(tag.soname) for tag in tags), "")  # type: ignore[attr-defined]
    raise ValueError("it is an ELF file and no shared library")
