"""Check that a daemon runs, reports no problems, and uses the same directory as doctor."""

from gpu_plugin.daemon import node_status
from gpu_plugin.devices.absent import remedy
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, failed, note, ok, seen, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.mps.remedies import TO_DO

_HANGS = (
    "the daemon hangs, and every pod that asks for a GPU waits for it: send it SIGUSR2 and it logs its tasks and threads (the "
    "unit: systemctl kill -s USR2 gpu-plugin), unless it is stopped (state T in `ps -eo pid,stat,comm`); keep its log, then "
    "delete its pod or systemctl restart gpu-plugin. If `state-directory` hangs, too, repair that first"
)

_KILLED = (
    "pods get no GPU until one runs: `kubectl get pods` for the DaemonSet, or `systemctl status gpu-plugin`, its log, and the "
    "kernel log for out-of-memory kills. If no daemon should run any more: gpu-plugin cleanup"
)


_MPS = "the log of `gpu-plugin mps` on this node has the details, and it starts the daemon again by itself"


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
    served = status["kubelet"].get("directory", "")
    if served and served != node.settings.socket_dir:
        found.append(
            warning(
                f"the daemon serves {served}, and these checks read {node.settings.socket_dir}",
                "give doctor the options and environment that the daemon was started with",
            )
        )
    driver = {**status.get("driver", {}), "restart": ""}
    # Without the problems that have their own remedy here
    elsewhere = {**status, "kubelet": {"socket": ""}, "missing": (), "driver": driver}
    found += [
        failed(f"{each['name']} is missing: {each['why']}", remedy(each.get("uuid", "")))
        for each in status.get("missing", ())
    ]
    if restart := status.get("driver", {}).get("restart"):
        found.append(failed(restart, "kubectl delete pod, of the plugin on this node, or systemctl restart gpu-plugin"))
    found += [_trouble(trouble) for trouble in node_status.troubles(elsewhere)]
    found += [
        failed(
            f"GPU {gpu['index']} ({gpu['uuid']}) is Unhealthy: {'; '.join(gpu['reasons'])}",
            f"`gpu-plugin explain {gpu['index']}` has advice, and the recovery that clears it",
        )
        for gpu in status["health"]["gpus"]
        if gpu["state"] == "unhealthy"
    ]
    found += [
        warning(f"CDI: {complaint}", "docs/containers.md says which files containers are given, and which are left out")
        for complaint in (status["cdi"] or {}).get("complaints", ())
    ]
    if found:
        return found
    about = status["daemon"]
    return ok(f"version {about['version']}, process {about['pid']}, and it reports no problem")


def _trouble(trouble: str) -> Finding:
    """Return the finding of a problem that the daemon reports, with the daemon's own remedy if it has one."""
    about, _, remedy = trouble.partition(TO_DO)
    otherwise = _MPS if " MPS daemon " in trouble else "`gpu-plugin status` and the daemon's log have the details"
    return failed(about, remedy or otherwise)
