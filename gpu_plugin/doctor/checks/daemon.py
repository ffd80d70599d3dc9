"""Check that a daemon runs, reports no problems, and uses the same directory as doctor."""

from collections.abc import Mapping

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, Status, failed, note, ok, seen, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.status.model import Problem, Severity
from gpu_plugin.status.remedies import in_words

_HANGS = (
    "the daemon hangs, and every pod that asks for a GPU waits for it: send it SIGUSR2 and it logs its tasks and threads (the "
    "unit: systemctl kill -s USR2 gpu-plugin), unless it is stopped (state T in `ps -eo pid,stat,comm`); keep its log, then "
    "delete its pod or systemctl restart gpu-plugin. If `state-directory` hangs, too, repair that first"
)

_KILLED = (
    "pods get no GPU until one runs: `kubectl get pods` for the DaemonSet, or `systemctl status gpu-plugin`, its log, and the "
    "kernel log for out-of-memory kills. If no daemon should run any more: gpu-plugin cleanup"
)


_STATUS: Mapping[Severity, Status] = {"critical": Status.FAILED, "warning": Status.WARNING, "note": Status.NOTE}


@check("daemon")
def daemon(node: Node) -> Finding | list[Finding]:
    """Fail with each problem that the running daemon reports, and for a daemon that hangs or was killed. Note a missing daemon.

    Registrations have a separate check.
    """
    known = seen(node.daemon(), "the daemon's status", _HANGS, needed=True)
    status = known.status
    if status is None:
        if known.refused:
            return failed(known.trouble, "only one daemon can serve a node: stop the other one, or see its log")
        if known.forbidden:
            return note(known.trouble, "run doctor as that user, or as root, to see what the daemon says")
        if known.abandoned:
            return failed(f"{known.trouble} Its socket exists, but no process listens on it: it was killed", _KILLED)
        return note(
            known.trouble,
            "if a daemon should be running: `kubectl get pods` for the DaemonSet, or `systemctl status gpu-plugin`, and its log",
        )
    found = []
    served = status.kubelet.directory
    if served and served != node.settings.socket_dir:
        found.append(
            warning(
                f"the daemon serves {served}, and these checks read {node.settings.socket_dir}",
                "give doctor the options and environment that the daemon was started with",
            )
        )
    found += [_finding(problem) for problem in status.problems if problem.kind != "not-registered"]
    about = status.daemon
    return found or ok(f"version {about.version}, process {about.pid}, and it reports no problem")


def _finding(problem: Problem) -> Finding:
    """Return the finding of a problem that the daemon reports, with its remedy."""
    found = f"{problem.title}: {problem.cause}" if problem.title != problem.cause else problem.cause
    return Finding(_STATUS[problem.severity], found, in_words(problem.steps))
