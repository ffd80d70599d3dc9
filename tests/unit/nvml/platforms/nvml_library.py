"""A shared library that nvidia-ml-py can load as NVML, and that only counts GPUs."""

import os
import struct

_MACHINES = {"x86_64": 62, "aarch64": 183}
_LOAD, _DYNAMIC, _GNU_STACK = 1, 2, 0x6474E551
_HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT = 4, 5, 6, 10, 11
_HEADERS = 64 + 3 * 56


def nvml_library(gpus: int, machine: str = os.uname().machine) -> bytes:
    """The library's file, for this kind of processor."""
    success = {"x86_64": b"\x31\xc0\xc3", "aarch64": struct.pack("<II", 0x52800000, 0xD65F03C0)}[machine]
    store = {  # the count to where the first argument points
        "x86_64": b"\xc7\x07" + struct.pack("<I", gpus),
        "aarch64": struct.pack("<II", 0x52800001 | gpus << 5, 0xB9000001),
    }[machine]
    return _shared_object(
        _MACHINES[machine],
        {"nvmlInitWithFlags": success, "nvmlShutdown": success, "nvmlDeviceGetCount_v2": store + success},
    )


def _shared_object(machine: int, functions: dict[str, bytes]) -> bytes:
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in functions)
    code, symbols = b"", bytes(24)
    for name, body in functions.items():
        at = strings.index(b"\0" + name.encode() + b"\0") + 1
        symbols += struct.pack("<IBBHQQ", at, 0x12, 0, 1, _HEADERS + len(code), len(body))
        code += body.ljust(16, b"\0")
    # One bucket with a chain through all symbols, so that every name is compared with each.
    count = len(functions) + 1
    chains = struct.pack(f"<III{count}I", 1, count, 1, 0, *range(2, count), 0)
    content, places = code, []
    for piece in (symbols, chains, strings):
        content = content.ljust(-(-len(content) // 8) * 8, b"\0")
        places.append(_HEADERS + len(content))
        content += piece
    content = content.ljust(-(-len(content) // 8) * 8, b"\0")
    start = _HEADERS + len(content)
    tags = [*zip((_SYMTAB, _HASH, _STRTAB), places, strict=True), (_STRSZ, len(strings)), (_SYMENT, 24), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    end = start + len(dynamic)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    header += struct.pack("<IIQQQQQQ", _LOAD, 7, 0, 0, 0, end, end, 0x10000)
    header += struct.pack("<IIQQQQQQ", _DYNAMIC, 6, start, start, start, len(dynamic), len(dynamic), 8)
    header += struct.pack("<IIQQQQQQ", _GNU_STACK, 6, 0, 0, 0, 0, 0, 16)
    return header + content + dynamic
