"""`gpu-plugin events`: prints the events of this node, with the users who requested them."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from gpu_plugin.cli.output import DATA, NO_DAEMON, SUCCESS, displayable, output_options, structured, width, wrapped
from gpu_plugin.cli.running_daemon import NoDaemon, ask, gpus_option, state_dir_option
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.times import utc
from gpu_plugin.config.values import duration
from gpu_plugin.devices.gpu_names import named
from gpu_plugin.devices.node import Gpu
from gpu_plugin.state.event_store import KINDS, recollect
from gpu_plugin.state.log import KEPT, lost_lines

DAY = 86400


def moment(text: str, now: float, after: float | None = None) -> float:
    """Return the Unix time of a duration before `now` (`90m`, `2h`), a time of day (`02:40`), or a date with a time of day.

    A time of day is the latest in the past or, with `after`, the first from then on. Times are in UTC; `now` and `after` are
    Unix times in seconds. Raises ValueError for any other text.
    """
    try:
        return now - duration(0, 366 * DAY)(text)
    except ValueError:
        pass
    for form in ("%H:%M", "%H:%M:%S"):
        try:
            of_day = datetime.strptime(text.removesuffix("Z"), form).replace(tzinfo=UTC).time()
        except ValueError:
            continue
        day = datetime.fromtimestamp(now if after is None else after, UTC).date()
        found = datetime.combine(day, of_day, UTC).timestamp()
        if after is None:
            return found if found <= now else found - DAY
        return found if found >= after else found + DAY
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time such as 2026-11-22T02:40 or 02:40 (UTC), nor a duration such as 2h"
        ) from None
    return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()


@click.command(
    "events",
    help=f"What happened, the oldest first: changes of health, registrations, configurations, orders with who gave them, "
    f"starts and stops; the newest {KEPT} are stored, also over restarts.",
    epilog="Example: gpu-plugin events --since 02:30 --until 03:00 --gpu 3. Where no daemon answers, the log in its state "
    "directory is read, and the exit status is 3.",
)
@state_dir_option
@gpus_option
@click.option("--since", metavar="TIME", help="Not before this: 2h (ago), 02:40 or 2026-11-22T02:40, in UTC.")
@click.option("--until", metavar="TIME", help="Not after this; a time of day is the first one after --since.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    metavar=f"[{'|'.join(KINDS)}]",
    help="Only this kind; may be repeated.",
)
@click.option("-n", "--last", type=click.IntRange(1), metavar="N", help="Only the newest N of them.")
@output_options
def command(
    state_dir: Path,
    gpu: str | None,
    since: str | None,
    until: str | None,
    kinds: tuple[str, ...],
    last: int | None,
    output: str,
) -> int:
    """Print the selected events."""
    now = time.time()
    begin = _moment("--since", since, now)
    end = _moment("--until", until, now, begin)
    if begin is not None and end is not None and end < begin:
        raise click.UsageError("--until is before --since: there is no time between them")
    status = SUCCESS
    try:
        reply = ask(state_dir, "events", gpu)
        found: list[dict[str, Any]] = reply["events"]
        if reply["left_out"]:
            click.echo(f"the oldest {reply['left_out']} are left out: they are in the state directory", err=True)
    except NoDaemon as error:
        found, status = _written(state_dir, gpu, error), NO_DAEMON
    found = [
        event
        for event in found
        if (begin is None or event["at"] >= begin)
        and (end is None or event["at"] <= end)
        and (not kinds or event["kind"] in kinds)
    ]
    if last is not None:
        found = found[-last:]
    if output in DATA:
        click.echo(structured(found, output))
    elif found:
        click.echo("\n".join(lines(displayable(found), width())))
    else:
        click.echo("no event is stored for that time", err=True)
    return status


def lines(events: Sequence[dict[str, Any]], columns: int | None = None) -> Iterator[str]:
    """Yield events as text, one line for each, or several on a narrow terminal."""
    for event in events:
        sentence = (
            event["text"] if event["text"].endswith("...") else event["text"].removesuffix(".")
        )  # more may follow
        text = f"{utc(event['at'])}  {event['kind']:<13}  {sentence}"
        if event.get("reason"):
            text += f"; reason: {event['reason']}"
        if event.get("by"):
            text += f"; by {event['by']}"
        yield from wrapped(text, " " * 25, columns)


def _moment(option: str, text: str | None, now: float, after: float | None = None) -> float | None:
    try:
        return None if text is None else moment(text, now, after)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None


def _written(state_dir: Path, gpu: str | None, silent: NoDaemon) -> list[dict[str, Any]]:
    """Return the events of the log in the state directory. Raises `silent` if it cannot be read either."""
    import msgspec  # noqa: PLC0415 - usage and help do not need it

    try:
        events, unreadable = recollect(state_dir)
    except OSError:
        raise silent from None
    click.echo(f"{silent.format_message()}; these events are from the log in {state_dir}", err=True)
    if unreadable:
        click.echo(lost_lines(unreadable), err=True)
    if gpu is not None:
        gpus = {
            event.uuid: Gpu(event.uuid, event.index or 0, pci_bus_id=event.bus_id) for event in events if event.uuid
        }
        try:
            wanted = named(gpu, tuple(gpus.values()))
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        events = [event for event in events if wanted is not None and event.uuid == wanted.uuid]
    return [msgspec.to_builtins(event) for event in events]
