"""Long options behind one dash, as Go's flag package takes them and so NVIDIA's plugin: -mig-strategy=single."""

from collections.abc import Collection, Sequence

import click


class OneDash(click.Command):
    """A command whose options may be written so."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses them, each as if it had two dashes."""
        names = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, with_two_dashes(args, names))


def with_two_dashes(args: Sequence[str], names: Collection[str]) -> list[str]:
    """The same arguments, where -name and -name=value have two dashes if --name is among `names`; none after --."""
    end = args.index("--") if "--" in args else len(args)
    long = [
        f"-{arg}" if arg.startswith("-") and f"-{arg.partition('=')[0]}" in names and arg not in names else arg
        for arg in args[:end]
    ]
    return [*long, *args[end:]]
