"""The user, the capabilities and the confinement of this process, and the names of the node's processes. Blocks."""

import os
from pathlib import Path

import msgspec

from gpu_plugin.containers.node_files.evidence import contained


class Process(msgspec.Struct, frozen=True):
    """This process. `capabilities` is CapEff of proc(5), `seccomp` its mode there: 0 off, 1 strict, 2 a filter.

    `selinux` is enforcing, permissive, or empty if it is off. `label` is the process's label under SELinux or AppArmor.
    `host_processes` is True if the process can see the node's other processes.
    """

    uid: int
    capabilities: int
    seccomp: int
    no_new_privileges: bool
    contained: bool
    read_only_root: bool
    selinux: str
    label: str
    host_processes: bool


def read_process(root: Path) -> Process:
    """Return the facts of this process. Raises OSError, ValueError or KeyError if /proc cannot be read."""
    lines = (line.partition(":") for line in (root / "proc/self/status").read_text().splitlines())
    status = {key: value.strip() for key, _, value in lines}
    inside = contained()
    return Process(
        uid=os.geteuid(),
        capabilities=int(status["CapEff"], 16),
        seccomp=int(status.get("Seccomp", "0")),
        no_new_privileges=status.get("NoNewPrivs") == "1",
        contained=inside,
        read_only_root=bool(os.statvfs("/").f_flag & os.ST_RDONLY),
        selinux={"1": "enforcing", "0": "permissive"}.get(_line(root / "sys/fs/selinux/enforce"), ""),
        label=_line(root / "proc/self/attr/current"),
        host_processes=not inside or name_of(root, 1) == "systemd",
    )


def processes(root: Path, beginning: str) -> tuple[tuple[int, str], ...]:
    """Return id and name of the processes whose names begin so. The kernel stores 15 characters of a name."""
    pids = sorted(int(entry.name) for entry in os.scandir(root / "proc") if entry.name.isdecimal())
    return tuple((pid, name) for pid in pids if (name := name_of(root, pid)).startswith(beginning))


def name_of(root: Path, pid: int) -> str:
    """Return a process's name; empty if it cannot be read."""
    return _line(root / f"proc/{pid}/comm")


def _line(file: Path) -> str:
    """Return the first line of a file of the kernel; empty if it cannot be read."""
    try:
        return file.read_bytes()[:4096].decode(errors="replace").rstrip("\0\n").partition("\n")[0]
    except OSError:
        return ""
