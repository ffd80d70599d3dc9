"""`gpu-plugin uninstall`: deletes DaemonSets and cleans up their nodes."""

import os
import re
from pathlib import Path

import anyio
import click

from gpu_plugin.cli.options import seconds
from gpu_plugin.config.errors import ConfigError


@click.command(
    "uninstall",
    help="Delete a DaemonSet of gpu-plugin, and remove what it left on its nodes: pods of another one, NAME-cleanup, which its "
    "annotation gpu-plugin/cleanup has, run `gpu-plugin cleanup` there and go when they are done. The Helm chart does so before "
    "it is uninstalled. Needs the rights to get, create and delete DaemonSets. Nodes that do not answer in time are counted and "
    "left as they are.",
)
@click.option("--namespace", required=True, envvar="NAMESPACE", metavar="NAME", help="Its namespace. [$NAMESPACE]")
@click.option(
    "--daemonset", "daemonsets", required=True, multiple=True, metavar="NAME", help="Its name; may be repeated."
)
@click.option(
    "--helm-release",
    "helm_release",
    metavar="NAMESPACE/NAME",
    help="Change nothing, and succeed, unless Helm installed the DaemonSet as this release (by Helm's annotations). For the "
    "chart's Job, which other tools than Helm apply together with the DaemonSet.",
)
@click.option(
    "--timeout", "timeout", default="60s", show_default=True, metavar="DURATION", help="How long to wait at most."
)
@click.option(
    "--kubeconfig", default="", metavar="FILE", help="How to reach the Kubernetes API. [default: as a pod of it]"
)
def command(
    namespace: str, daemonsets: tuple[str, ...], helm_release: str | None, timeout: str, kubeconfig: str
) -> int:
    """Print each step. Nodes that were not reached are no failure, because they must not prevent uninstalling."""
    from gpu_plugin.cli.uninstall import nodes  # noqa: PLC0415 - takes 60 ms; usage, help and `cleanup` do not need it
    from gpu_plugin.cluster.connection import UnreachableError, connect, require_client  # noqa: PLC0415
    from gpu_plugin.daemon.config_source import MAX_KUBECONFIG  # noqa: PLC0415
    from gpu_plugin.runtime.regular_file import require_file  # noqa: PLC0415
    from gpu_plugin.runtime.signals import Signals  # noqa: PLC0415

    if helm_release is not None and not re.fullmatch("[^/]+/[^/]+", helm_release):
        raise click.UsageError(f"--helm-release: {helm_release!r} is not NAMESPACE/NAME")
    patience = seconds("--timeout", timeout, 1, 3600)
    failed: list[str] = []

    async def clean_up(name: str) -> None:
        named = f"DaemonSet {namespace}/{name}"
        try:
            async with connect(kubeconfig) as server:
                found = nodes.DaemonSets(server, namespace)
                done, count = await nodes.clean(found, name, patience, named, _owner(), helm_release)
        except (UnreachableError, nodes.ForeignDaemonSetError) as error:
            failed.append(f"{named}: {error}")
            return
        if done < count:
            click.echo(
                f"{named}: {count - done} of {count} nodes were not cleaned up within {timeout}: run gpu-plugin cleanup on them, "
                "or leave their files, which do no harm",
                err=True,
            )

    async def run() -> None:
        signals = Signals(reloads=False)
        async with anyio.create_task_group() as work:
            signals.on_stop(work.cancel_scope.cancel)
            for name in dict.fromkeys(daemonsets):
                work.start_soon(clean_up, name)
        if signals.stopped_by:
            failed.append("interrupted by a signal")

    try:
        require_client("uninstall", "")
        if kubeconfig:
            require_file(Path(kubeconfig), MAX_KUBECONFIG)
    except OSError as error:
        raise click.UsageError(f"--kubeconfig: {kubeconfig}: {error.strerror}") from None
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    anyio.run(run)
    if failed:
        raise click.ClickException("; ".join(failed))
    return 0


def _owner() -> dict[str, object] | None:
    """Return a reference to the Job that runs this process, if the environment names it, so that it owns its DaemonSet."""
    name, uid = os.environ.get("JOB_NAME"), os.environ.get("JOB_UID")
    if not name or not uid:
        return None
    return {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "blockOwnerDeletion": False}
