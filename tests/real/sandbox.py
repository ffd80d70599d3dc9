"""Start a program in the sandbox of a systemd unit, on a machine whose first process is not systemd.

    python -m tests.real.sandbox UNIT DROP_IN... -- HOST_DIRECTORY:PATH... -- PROGRAM ARGUMENT...

Of [Service], it applies the following keys as described in systemd.exec(5): CapabilityBoundingSet, NoNewPrivileges,
ProtectSystem=strict with ReadWritePaths, StateDirectory and RuntimeDirectory, BindPaths, PrivateNetwork, PrivateIPC,
RestrictAddressFamilies, MemoryDenyWriteExecute, SystemCallFilter with SystemCallErrorNumber, UMask. It ignores cgroups
(DevicePolicy, IPAddressDeny) and all other keys. /tmp is read-only instead of private.

The unit may write to directories of this machine. A mount namespace hides them: /var/lib and /run are empty there, and each
HOST_DIRECTORY is mounted at its PATH. /opt is this machine's /opt.
"""

import ctypes
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x20000, 0x8000000, 0x40000000  # linux/sched.h
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096  # linux/mount.h
_MS_REC, _MS_PRIVATE, _MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME = 1 << 14, 1 << 18, 1 << 10, 1 << 11, 1 << 21
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38  # linux/prctl.h
_PROT_WRITE, _PROT_EXEC, _SHM_EXEC = 2, 4, 0o100000  # sys/mman.h, sys/shm.h
_SCMP_ACT_ALLOW, _SCMP_ACT_ERRNO, _SCMP_CMP_MASKED_EQ = 0x7FFF0000, 0x00050000, 7  # seccomp.h of libseccomp
_CAPABILITIES = {"CAP_SYS_ADMIN": 21}  # linux/capability.h: the capabilities in the units
_FAMILIES = {"AF_UNIX": socket.AF_UNIX, "AF_INET": socket.AF_INET, "AF_INET6": socket.AF_INET6}
_API_FILE_SYSTEMS = ("/dev", "/proc", "/sys")

Setting = Mapping[str, Sequence[str]]


def settings(unit: Path, drop_ins: Sequence[Path] = ()) -> Setting:
    """Return [Service] of a unit with its drop-ins: the words of each key in order, after its last empty assignment.

    systemd.syntax(7): an empty assignment removes all former values. Of a key with a single value (ProtectSystem), the last word
    is in force.
    """
    found: dict[str, list[str]] = {}
    for path in (unit, *drop_ins):
        section = ""
        for line in map(str.strip, path.read_text().splitlines()):
            if line.startswith("["):
                section = line
            elif section == "[Service]" and "=" in line and not line.startswith("#"):
                key, _, value = line.partition("=")
                found.setdefault(key, [])
                if value:
                    found[key].append(value)
                else:
                    found[key].clear()
    return found


def system_calls(filters: Sequence[str]) -> set[str]:
    """Return the system calls that the values of SystemCallFilter= allow, with the sets of this machine's systemd."""
    allowed = set(_set("@default"))  # always part of an allow-list
    for value in filters:
        calls = {call for word in value.removeprefix("~").split() for call in _set(word)}
        allowed = allowed - calls if value.startswith("~") else allowed | calls
    return allowed


@cache
def _set(name: str) -> frozenset[str]:
    if not name.startswith("@"):
        return frozenset((name,))
    listed = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
    words = [word for line in listed.stdout.splitlines()[1:] for word in [line.strip()] if word and word[0] != "#"]
    return frozenset(call for word in words for call in _set(word))


def _said(unit: Setting, key: str, default: str = "") -> str:
    return unit[key][-1] if unit.get(key) else default


def enter(unit: Setting, places: Mapping[str, Path]) -> None:
    """Move this process into the unit's sandbox, permanently. `places` has the machine's directory for each path in the sandbox.

    Raises:
        OSError: the kernel refused a step.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    calls = system_calls(unit.get("SystemCallFilter", ()))  # read this while programs can still be started
    flags = _CLONE_NEWNS
    flags |= _CLONE_NEWNET if _said(unit, "PrivateNetwork") == "yes" else 0
    flags |= _CLONE_NEWIPC if _said(unit, "PrivateIPC") == "yes" else 0
    _check(libc.unshare(flags), "unshare")
    if _said(unit, "ProtectSystem") != "strict":
        raise ValueError("this sandbox supports only ProtectSystem=strict")
    writable = [*unit.get("ReadWritePaths", ())]
    writable += [f"/var/lib/{name}" for name in unit.get("StateDirectory", ())]
    writable += [f"/run/{name}" for name in unit.get("RuntimeDirectory", ())]
    binds = [value.partition(":") for value in unit.get("BindPaths", ())]
    _mounts(libc, places, writable, {path: source for source, _, path in binds})
    os.umask(int(_said(unit, "UMask", "0022"), 8))
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    keep = {_CAPABILITIES[name] for value in unit.get("CapabilityBoundingSet", ()) for name in value.split()}
    for capability in range(last + 1) if "CapabilityBoundingSet" in unit else ():
        if capability not in keep:
            _check(libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(PR_CAPBSET_DROP)")
    if _said(unit, "NoNewPrivileges") == "yes":
        _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    if _said(unit, "MemoryDenyWriteExecute") == "yes":
        _deny_writable_code(seccomp)
    families = [_FAMILIES[name] for value in unit["RestrictAddressFamilies"] for name in value.split()]
    _deny_families(seccomp, families)
    if unit.get("SystemCallFilter"):
        _allow_calls(seccomp, calls, getattr(errno, _said(unit, "SystemCallErrorNumber")))


def _mounts(libc: ctypes.CDLL, places: Mapping[str, Path], writable: Sequence[str], binds: Mapping[str, str]) -> None:
    held = {path: os.open(directory, os.O_PATH | os.O_DIRECTORY) for path, directory in places.items()}
    _mount(libc, "none", "/", "", _MS_REC | _MS_PRIVATE)
    for hidden in ("/var/lib", "/run"):
        _mount(libc, "tmpfs", hidden, "tmpfs", 0)
        Path(hidden).chmod(0o755)  # the mode on a node; a new tmpfs has mode 1777
    for path, directory in held.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount(libc, f"/proc/self/fd/{directory}", path, "", _MS_BIND)
        os.close(directory)
    for path, source in binds.items():
        _mount(libc, source, path, "", _MS_BIND)
    stay = {os.path.realpath(path) for path in writable}
    for mount_point, flags in list(_mounted()):
        covered = mount_point.startswith(("/var/lib/", "/run/")) and mount_point not in places
        if mount_point not in stay and not covered and not mount_point.startswith(_API_FILE_SYSTEMS):
            _mount(libc, "none", mount_point, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)


def _mounted() -> Iterator[tuple[str, int]]:
    """Return each mount point with the flags that a remount must repeat: otherwise the kernel refuses it or drops the flags."""
    known = {
        "nosuid": _MS_NOSUID,
        "nodev": _MS_NODEV,
        "noexec": _MS_NOEXEC,
        "noatime": _MS_NOATIME,
        "nodiratime": _MS_NODIRATIME,
        "relatime": _MS_RELATIME,
    }
    seen = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        seen[fields[4].encode().decode("unicode_escape")] = sum(known.get(word, 0) for word in fields[5].split(","))
    return iter(seen.items())


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str, flags: int) -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None)
    _check(result, f"mount {target}")


def _deny_families(seccomp: ctypes.CDLL, families: Sequence[int]) -> None:
    """Make socket(2) of other families fail with EAFNOSUPPORT. Rules for a call are joined by "or", so each family has a rule."""
    filter_ = _filter(seccomp, _SCMP_ACT_ALLOW)
    number = seccomp.seccomp_syscall_resolve_name(b"socket")
    denied = [family for family in range(socket.AF_VSOCK + 10) if family not in families]
    for family in denied:
        _rule(seccomp, filter_, _SCMP_ACT_ERRNO | errno.EAFNOSUPPORT, number, (0, 0xFFFFFFFF, family))
    _check(-seccomp.seccomp_load(filter_), "seccomp_load")


def _deny_writable_code(seccomp: ctypes.CDLL) -> None:
    """Forbid memory that is writable and executable, as systemd does since 231 (systemd.exec(5), MemoryDenyWriteExecute)."""
    filter_ = _filter(seccomp, _SCMP_ACT_ALLOW)
    both = _PROT_WRITE | _PROT_EXEC
    for name, argument, mask in (
        (b"mmap", 2, both),
        (b"mprotect", 2, _PROT_EXEC),
        (b"pkey_mprotect", 2, _PROT_EXEC),
        (b"shmat", 2, _SHM_EXEC),
    ):
        number = seccomp.seccomp_syscall_resolve_name(name)
        _rule(seccomp, filter_, _SCMP_ACT_ERRNO | errno.EPERM, number, (argument, mask, mask))
    _check(-seccomp.seccomp_load(filter_), "seccomp_load")


def _allow_calls(seccomp: ctypes.CDLL, names: set[str], error: int) -> None:
    filter_ = _filter(seccomp, _SCMP_ACT_ERRNO | error)
    for name in sorted(names):
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # negative: another architecture's
            _rule(seccomp, filter_, _SCMP_ACT_ALLOW, number)
    _check(-seccomp.seccomp_load(filter_), "seccomp_load")


def _filter(seccomp: ctypes.CDLL, otherwise: int) -> ctypes.c_void_p:
    seccomp.seccomp_init.restype = ctypes.c_void_p
    return ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(otherwise)))


class _Argument(ctypes.Structure):
    """struct scmp_arg_cmp of libseccomp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _rule(
    seccomp: ctypes.CDLL, filter_: ctypes.c_void_p, action: int, number: int, where: tuple[int, int, int] | None = None
) -> None:
    """Add a rule. `where` has the number of an argument, a mask, and the masked value for which the rule holds."""
    conditions = () if where is None else (_Argument(where[0], _SCMP_CMP_MASKED_EQ, where[1], where[2]),)
    array = (_Argument * max(1, len(conditions)))(*conditions)
    code = seccomp.seccomp_rule_add_array(filter_, ctypes.c_uint32(action), number, len(conditions), array)
    _check(-code, f"seccomp_rule_add of system call {number}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno() if result < 0 else result
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _main(arguments: Sequence[str]) -> None:
    first = arguments.index("--")
    second = arguments.index("--", first + 1)
    unit, *drop_ins = map(Path, arguments[:first])
    places = {path: Path(here) for here, _, path in (word.partition(":") for word in arguments[first + 1 : second])}
    command = list(arguments[second + 1 :])
    enter(settings(unit, drop_ins), places)
    os.execv(command[0], command)


if __name__ == "__main__":
    _main(sys.argv[1:])
