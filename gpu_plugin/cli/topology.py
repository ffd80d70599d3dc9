"""`gpu-plugin topology`: prints the links of a node's GPUs as text, JSON or a picture."""

from collections.abc import Sequence
from pathlib import Path

import click

from gpu_plugin.cli.output import DATA, output_options, structured
from gpu_plugin.cli.running_daemon import state_dir_option
from gpu_plugin.cli.topology_source import daemons_node, simulate_option, simulated_node
from gpu_plugin.devices.device import GPU
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views import matrix
from gpu_plugin.placement.views.groups import LinkGroups
from gpu_plugin.placement.views.matrix import pairs_json
from gpu_plugin.placement.views.picture import picture
from gpu_plugin.placement.views.report import Offered, held_back
from gpu_plugin.runtime.regular_file import replace_file

_MODE = 0o644


@click.command(
    "topology",
    help="How this node's GPUs are linked, as the running daemon knows it: the matrix that nvidia-smi topo -m shows, and "
    "the groups in it. NV# stands for # NVLinks, and takes the place of what PCIe there is beside them.",
    epilog="Example: gpu-plugin topology --simulate dgx1-v100 --svg dgx1-v100.svg. Exit status 3 where no "
    "daemon answers, 1 where a file cannot be written.",
)
@simulate_option
@state_dir_option
@click.option("--scores", "as_scores", is_flag=True, help="The score of each pair, which is what placement adds up.")
@output_options
@click.option(
    "--svg",
    metavar="FILE",
    help="Also draw the link groups into this SVG file; - for standard output, instead of the text.",
)
def command(simulate: str | None, state_dir: Path, as_scores: bool, output: str, svg: str | None) -> None:  # noqa: FBT001
    """Print the topology, and write the picture if --svg names a file."""
    as_data = output in DATA
    if svg == "-" and (as_data or as_scores):
        raise click.UsageError("--svg - writes to standard output: leave out --json and --scores, or name a file")
    if svg == "":
        raise click.UsageError("--svg: name the file, or - for standard output")
    if as_data and as_scores:
        raise click.UsageError("--json has the scores: leave out --scores")

    node, resources = daemons_node(state_dir) if simulate is None else (simulated_node(simulate), ())
    kept = held_back(node, resources) if simulate is None else []
    groups, topology = LinkGroups.of(node), Topology.of(node)
    if svg is not None:
        _draw(groups, topology, simulate or "", kept, svg)
    if as_data:
        click.echo(structured(pairs_json(groups, topology), output))
    elif svg != "-":
        click.echo("\n".join(_text(groups, topology, kept, scores=as_scores)))


def _text(groups: LinkGroups, topology: Topology, held_back: Sequence[Offered], *, scores: bool) -> list[str]:
    if scores:
        return matrix.scores(groups, topology.scores)
    shown = [*matrix.matrix(groups), "", *matrix.legend(groups), "", *matrix.words(groups)]
    if held_back:
        shown.append(f"Held back from pods: {matrix.held_back_words(held_back)}")
    return shown


def _draw(groups: LinkGroups, topology: Topology, name: str, held_back: Sequence[Offered], file: str) -> None:
    drawn = picture(groups, topology, name, {each.visible_id: each.reason for each in held_back if each.kind == GPU})
    if file == "-":
        click.echo(drawn, nl=False)
        return
    try:
        path = Path(file).resolve()  # replace the target of a link, not the link
        if path.exists() and not path.is_file():
            raise OSError("it exists and is not a regular file; name another one, or - for standard output")
        replace_file(path, drawn.encode(), _MODE)
    except OSError as error:
        raise click.ClickException(f"--svg: {file} cannot be written: {error.strerror or error}") from None
    click.echo(f"{file}: written", err=True)
