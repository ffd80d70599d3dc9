"""Check this process's user and capabilities against the needs of a daemon."""

from gpu_plugin.config.sharing import MPS
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, note, ok, seen, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.doctor.process import Process

# Capabilities as Kubernetes spells them, by their numbers (linux/capability.h, Linux 5.9 and later)
_NAMES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER"),
    *("SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE"),
    *("SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP"),
    *("MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF"),
    "CHECKPOINT_RESTORE",
)

_SYS_ADMIN = _NAMES.index("SYS_ADMIN")
# The 38 capabilities of Linux before 5.8: a process with all of them is reported as having all capabilities
_ALL = (1 << 38) - 1


@check("permissions")
def permissions(node: Node) -> Finding | list[Finding]:
    """Note facts that this user cannot see; warn if an enabled feature needs a missing capability."""
    known = seen(node.process(), "this process")
    found = []
    if known.uid:
        found.append(
            note(
                f"{_words(known)}: facts that only root can see (the daemon's socket, other users' processes) are left out",
                "run doctor as root, as the daemon runs",
            )
        )
    settings = node.settings
    if known.contained and not known.capabilities >> _SYS_ADMIN & 1 and settings.mig_strategy != "none":
        found.append(
            warning(
                f"--mig-strategy {settings.mig_strategy} without the capability SYS_ADMIN: NVIDIA's runtime gives access to "
                "MIG monitoring only to containers that have it",
                "add SYS_ADMIN to the container's securityContext (the chart does)",
            )
        )
    if any(entry.strategy == MPS for entry in settings.sharing) and known.contained and not known.host_processes:
        found.append(
            note("only a container with the node's process ids (hostPID) can see the processes of MPS daemons")
        )
    return found or ok(_words(known))


def _words(known: Process) -> str:
    all_of_them = known.capabilities & _ALL == _ALL
    capabilities = "all capabilities" if all_of_them else _named(known.capabilities)
    parts = [f"uid {known.uid}", capabilities]
    parts.append({0: "no seccomp filter", 1: "strict seccomp"}.get(known.seccomp, "a seccomp filter"))
    parts += ["no new privileges"] if known.no_new_privileges else []
    parts += ["a read-only root"] if known.read_only_root else []
    parts += ["in a container"] if known.contained else ["on the host"]
    return ", ".join(parts)


def _named(capabilities: int) -> str:
    present = [_NAMES[bit] if bit < len(_NAMES) else str(bit) for bit in range(64) if capabilities >> bit & 1]
    if len(present) > len(_NAMES) // 2:
        missing = [name for bit, name in enumerate(_NAMES) if not capabilities >> bit & 1]
        return f"all capabilities but {', '.join(missing)}"
    if not present:
        return "no capability"
    return f"the {'capability' if len(present) == 1 else 'capabilities'} {', '.join(present)}"
