"""What this process may do, and what a daemon would need."""

from collections.abc import Sequence

from gpu_plugin.config.sharing import MPS
from gpu_plugin.doctor.facts import Facts, Process, Unknown
from gpu_plugin.doctor.finding import Finding, note, ok, unseen, warning

_SYS_ADMIN = 21
_ALL = (1 << 38) - 1
"""Number of the capability, and all that kernels have had for long (linux/capability.h)."""


def permissions(facts: Facts) -> Sequence[Finding]:
    """Notes what is not to be seen as this user; warns where a feature that is on needs a capability that is missing."""
    known = facts.process
    if isinstance(known, Unknown):
        return [unseen("this process", known)]
    found = []
    if known.uid:
        found.append(
            note(
                f"{_words(known)}: what only root can see (the daemon's socket, processes of others) is left out",
                "run doctor as root, as the daemon runs",
            )
        )
    settings = facts.settings
    if known.contained and not known.capabilities >> _SYS_ADMIN & 1 and settings.mig_strategy != "none":
        found.append(
            warning(
                f"--mig-strategy {settings.mig_strategy} without the capability SYS_ADMIN: NVIDIA's runtime gives access to "
                "MIG monitoring only to containers that have it",
                "add SYS_ADMIN to the container's securityContext (the chart does)",
            )
        )
    if any(entry.strategy == MPS for entry in settings.sharing) and known.contained and not known.host_processes:
        found.append(note("what MPS daemons run is seen only in a container with the node's process ids (hostPID)"))
    return found or [ok(_words(known))]


def _words(known: Process) -> str:
    all_of_them = known.capabilities & _ALL == _ALL
    capabilities = (
        "all capabilities" if all_of_them else "no capability" if not known.capabilities else "some capabilities"
    )
    parts = [f"uid {known.uid}", capabilities]
    parts.append({0: "no seccomp filter", 1: "strict seccomp"}.get(known.seccomp, "a seccomp filter"))
    parts += ["no new privileges"] if known.no_new_privileges else []
    parts += ["a read-only root"] if known.read_only_root else []
    parts += ["in a container"] if known.contained else ["on the host"]
    return ", ".join(parts)
