"""`gpu-plugin demo`: shows the work of the daemon in a few seconds and without a GPU."""

import sys

import click


@click.command(
    "demo",
    help="Run the real daemon on a simulated 8-GPU node under a stand-in kubelet, and print what happens as a timeline.",
    epilog="Needs no GPU, no cluster and no root; leaves nothing behind. Exit status 1 if anything did not happen.",
)
def command() -> int:
    """Run the demo on standard output. The exit status is 0 if all of it happened."""
    from gpu_plugin.simulation import demo  # noqa: PLC0415 - a usage message does not need it

    return demo.run(sys.stdout)
