"""`gpu-plugin man`: prints the manual page, made from the verbs and their options."""

from collections.abc import Iterator

import click

from gpu_plugin import __version__


@click.command("man", help="Print the manual page of all verbs, for man -l - or a file gpu-plugin.1.")
@click.pass_context
def command(context: click.Context) -> None:
    """Print the page."""
    click.echo("\n".join(page(context.find_root().command)))


def page(root: click.Command) -> Iterator[str]:
    """Yield the lines of the page in roff, with the macros of man."""
    yield f'.TH GPU-PLUGIN 1 "" "gpu-plugin {_text(__version__)}"'
    yield from (".SH NAME", r"gpu\-plugin \- an NVIDIA GPU device plugin for the kubelet")
    yield from (".SH SYNOPSIS", r"\fBgpu\-plugin\fR \fIVERB\fR [\fIOPTION\fR]...")
    yield ".SH VERBS"
    context = click.Context(root, info_name="gpu-plugin")
    yield from _verbs(root, context)
    if root.epilog:
        yield from (".SH EXIT STATUS", _text(root.epilog))


def _verbs(group: click.Command, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context) if isinstance(group, click.Group) else ():
        verb = group.get_command(context, name) if isinstance(group, click.Group) else None
        if verb is not None:
            within = click.Context(verb, info_name=name, parent=context)
            yield f".SS {_text(' '.join([within.command_path, *verb.collect_usage_pieces(within)]))}"
            yield from (_text(each) for each in (verb.help, verb.epilog) if each)
            for parameter in verb.get_params(within):
                record = parameter.get_help_record(within)
                if record is not None:
                    yield from (".TP", rf"\fB{_text(record[0])}\fR", _text(record[1]))
            yield from _verbs(verb, within)


def _text(text: str) -> str:
    r"""Return the text on one line of roff; \& protects a dot or quote at its beginning."""
    plain = " ".join(text.split()).replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{plain}" if plain.startswith((".", "'")) else plain
