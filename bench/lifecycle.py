"""Start, end, and the kubelet's restart."""

import sys
from pathlib import Path

from bench.kubelet import ListStream, listening
from bench.node import serving
from bench.plan import Plan
from bench.process import daemon_command, running
from bench.quantiles import median, median_ratio, percentile
from bench.table import Row

BARE_IMPORTS = "import grpclib.server, grpclib.client, betterproto"


def start_and_end(plan: Plan, directory: Path) -> list[Row]:
    """Measure process start to Register, and SIGTERM to exit.

    The start is measured in turn with `bare_plugin` and with the imports of its libraries.
    """
    started, ended, bare, imported = [], [], [], []
    directory.mkdir()
    with listening(directory) as kubelet:
        for at in range(2 * plan.rounds + 1):
            with running(daemon_command(directory), directory / "log") as daemon:
                registration = kubelet.registered()
                stream = ListStream(registration.socket)
                try:
                    stream.next()
                    end = daemon.terminate()
                finally:
                    stream.close()
            with running([sys.executable, "-m", "bench.bare_plugin", str(directory)], directory / "log") as plugin:
                bare_registration = kubelet.registered()
                plugin.terminate()
            bare_registration.socket.unlink()
            with running([sys.executable, "-c", BARE_IMPORTS], directory / "log") as imports:
                import_end = imports.exited()
            if at:  # the first one warms the page cache and makes the state directory
                started.append((registration.at - daemon.began) * 1000)
                ended.append(end * 1000)
                bare.append((bare_registration.at - plugin.began) * 1000)
                imported.append((import_end - imports.began) * 1000)
    start = Row(
        "start to registered",
        "ms",
        len(started),
        median(started),
        percentile(started, 99),
        bare=median(bare),
        ratio=median_ratio(started, bare),
        ratio_budget=1.6,
        note=f"grpclib and betterproto imported, nothing else: {median(imported):.0f} ms",
        series={"ms": started, "bare_ms": bare, "imported_ms": imported},
    )
    return [start, _row("SIGTERM to exit", ended, 200)]


def kubelet_restart(plan: Plan, directory: Path) -> list[Row]:
    """Measure a restart of the kubelet: from the time when the new kubelet listens to the daemon's list on a new stream."""
    taken = []
    with serving(directory) as node:
        for _ in range(2 * plan.rounds):
            node.kubelet.stop()
            node.kubelet.remove_sockets()
            node.stream.close()
            listening_at = node.kubelet.listen()
            node.registration = node.kubelet.registered()
            node.stream = ListStream(node.registration.socket)
            taken.append((node.stream.next().at - listening_at) * 1000)
    return [_row("kubelet restart to new list", taken, 50)]


def _row(figure: str, taken: list[float], budget: float) -> Row:
    return Row(figure, "ms", len(taken), median(taken), percentile(taken, 99), budget, series={"ms": taken})
