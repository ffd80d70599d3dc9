"""`gpu-plugin uninstall`: has every node of DaemonSets cleaned up, before these themselves are deleted."""

import click

from gpu_plugin.config.errors import ConfigError


@click.command(
    "uninstall",
    help="Have the pods of a DaemonSet remove what gpu-plugin left on their nodes, and wait for it. Run it before the DaemonSet "
    "is deleted; the Helm chart does. Needs the right to get and patch that DaemonSet. "
    "Nodes that do not answer in time are counted and left as they are: run `gpu-plugin cleanup` there.",
)
@click.option("--namespace", required=True, envvar="NAMESPACE", metavar="NAME", help="Its namespace. [$NAMESPACE]")
@click.option(
    "--daemonset", "daemonsets", required=True, multiple=True, metavar="NAME", help="Its name; may stand several times."
)
@click.option(
    "--timeout", "seconds", default="60s", show_default=True, metavar="DURATION", help="How long to wait at most."
)
@click.option(
    "--kubeconfig", default="", metavar="FILE", help="How to reach the Kubernetes API. [default: as a pod of it]"
)
def command(namespace: str, daemonsets: tuple[str, ...], seconds: str, kubeconfig: str) -> int:
    """Prints each step. Nodes that were not reached are no failure: they must not keep anybody from uninstalling."""
    from gpu_plugin.config.values import duration  # noqa: PLC0415 - usage and help need none of it

    try:
        timeout = duration(1, 3600)(seconds)
    except ValueError as error:
        raise click.UsageError(f"--timeout: {error}", click.get_current_context()) from None

    import anyio  # noqa: PLC0415

    from gpu_plugin.cluster.connection import UnreachableError, require_client  # noqa: PLC0415
    from gpu_plugin.cluster.daemonset import opened  # noqa: PLC0415
    from gpu_plugin.uninstall.nodes import clean  # noqa: PLC0415
    from gpu_plugin.uninstall.template import ForeignDaemonSetError  # noqa: PLC0415

    failed: list[str] = []

    async def clean_up(name: str) -> None:
        named = f"DaemonSet {namespace}/{name}"
        try:
            async with opened(kubeconfig, namespace, name) as found:
                done, nodes = await clean(found, timeout, lambda text: click.echo(f"{named}: {text}"))
        except (UnreachableError, ForeignDaemonSetError) as error:
            failed.append(f"{named}: {error}")
            return
        if done < nodes:
            click.echo(
                f"{named}: {nodes - done} of {nodes} nodes were not cleaned up within {seconds}: run gpu-plugin cleanup on them, "
                "or leave what is there; it does no harm",
                err=True,
            )

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            for name in dict.fromkeys(daemonsets):
                tasks.start_soon(clean_up, name)

    try:
        require_client("uninstall", "")
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    anyio.run(run)
    if failed:
        raise click.ClickException("; ".join(failed))
    return 0
