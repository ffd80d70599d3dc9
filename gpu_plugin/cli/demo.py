"""`gpu-plugin demo`: what the daemon does, seen in a few seconds and without a GPU."""

import sys

import click


@click.command(
    "demo",
    help="Run the real daemon on a simulated 8-GPU node under a stand-in kubelet, and print what happens as a timeline.",
    epilog="Needs no GPU, no cluster and no root; leaves nothing behind. Exit status 1 if anything did not happen.",
)
def command() -> int:
    """Plays the demo on standard output; the exit status is 0 when all of it happened."""
    from gpu_plugin.simulation import demo  # noqa: PLC0415 - a usage message needs none of it

    return demo.run(sys.stdout)
