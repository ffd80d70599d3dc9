"""The user, the capabilities and the confinement of this process. Blocks."""

import os
from collections.abc import Mapping
from pathlib import Path

from gpu_plugin.containers.node_files.evidence import contained
from gpu_plugin.doctor.facts import Process

_INIT = "systemd"


def process(proc: Path = Path("/proc"), sys: Path = Path("/sys"), environ: Mapping[str, str] = os.environ) -> Process:
    """Return the facts of this process from proc(5). Raises OSError, ValueError or KeyError if they cannot be read."""
    lines = (line.partition(":") for line in (proc / "self/status").read_text().splitlines())
    status = {key: value.strip() for key, _, value in lines}
    inside = contained(environ)
    return Process(
        uid=os.geteuid(),
        capabilities=int(status["CapEff"], 16),
        seccomp=int(status.get("Seccomp", "0")),
        no_new_privileges=status.get("NoNewPrivs") == "1",
        contained=inside,
        read_only_root=bool(os.statvfs("/").f_flag & os.ST_RDONLY),
        selinux={"1": "enforcing", "0": "permissive"}.get(_line(sys / "fs/selinux/enforce"), ""),
        label=_line(proc / "self/attr/current"),
        host_processes=not inside or name_of(1, proc) == _INIT,
    )


def processes(names: tuple[str, ...], proc: Path = Path("/proc")) -> tuple[tuple[int, str], ...]:
    """Return processes by id whose names begin with any of `names`. The kernel stores 15 characters of a name."""
    found = []
    for entry in os.scandir(proc):
        if entry.name.isdecimal():
            pid = int(entry.name)
            name = name_of(pid, proc)
            if name.startswith(names):
                found.append((pid, name))
    return tuple(sorted(found))


def name_of(pid: int, proc: Path = Path("/proc")) -> str:
    """Return a process's name; empty if it cannot be read."""
    return _line(proc / str(pid) / "comm")


def _line(file: Path) -> str:
    """Return the first line of a file of the kernel; empty if it cannot be read."""
    try:
        return file.read_bytes()[:4096].decode(errors="replace").rstrip("\0\n").partition("\n")[0]
    except OSError:
        return ""
