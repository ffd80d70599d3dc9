"""The image: the time from its start in a container to Register, in turn with this checkout's command as a plain process."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.kubelet import Kubelet, listening
from bench.plan import MeasurementError, Plan
from bench.process import PROFILE, daemon_command, running
from bench.quantiles import median, median_ratio, percentile
from bench.table import Row
from tests.cluster.harness.binaries import MissingError
from tests.real import image_build

TAG = "localhost/gpu-plugin-test/gpu-plugin:1"
USER = 65532
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp")

_BEGIN = "import os, sys, time; print(time.perf_counter(), flush=True); os.execv(sys.argv[1], sys.argv[1:])"
"""Prints the time at which the container's process begins, then becomes the command. All containers have the same clock."""


def start(plan: Plan, directory: Path) -> Sequence[Row]:
    """Return both figures of a container's start. If no container can run, print the reason and return no figures."""
    try:
        archive = image_build.install(partial(print, file=sys.stderr), TAG)
    except MissingError as error:
        print(f"image: not measured: {error}", file=sys.stderr)
        return []
    directory.mkdir()
    inside, whole, bare = [], [], []
    with _loaded(archive, directory) as podman, listening(directory) as kubelet:
        (directory / "kubelet.sock").chmod(0o777)
        os.chown(directory, USER, USER)
        for at in range(plan.rounds + 1):
            asked, begun, registered = _container(podman, directory, kubelet)
            with running(daemon_command(directory), directory / "log") as daemon:
                process = kubelet.registered().at - daemon.began
                daemon.terminate()
            if at:  # the first round fills the page cache and makes the state directories
                inside.append((registered - begun) * 1000)
                whole.append((registered - asked) * 1000)
                bare.append(process * 1000)
    return [
        _row("image: start to registered", inside, bare, 1.3),
        _row("image: podman run to registered", whole, bare, None),
    ]


@contextmanager
def _loaded(archive: Path, directory: Path) -> Iterator[list[str]]:
    """Load the image and give the beginning of a podman command."""
    podman = image_build.podman(directory)
    try:
        image_build.run([*podman, "load", f"--input={archive}"])
        yield podman
    finally:
        image_build.cleared(podman, directory)


def _container(podman: Sequence[str], directory: Path, kubelet: Kubelet) -> tuple[float, float, float]:
    """Run the image until it has registered.

    Returns the times of podman's start, of the container's process and of the registration.
    """
    state = directory / "image-state"
    if not state.is_dir():
        state.mkdir()
        os.chown(state, USER, USER)
    command = [*podman, "run", "--rm", *image_build.LIMITS, *HARDENED, "--entrypoint=/opt/gpu-plugin/bin/python3"]
    command += [f"--volume={directory}:/var/lib/kubelet/device-plugins", f"--volume={state}:/var/lib/gpu-plugin", TAG]
    command += ["-I", "-S", "-c", _BEGIN, "/opt/gpu-plugin/bin/gpu-plugin", "run", f"--simulate={PROFILE}"]
    with running(command, directory / "log") as container:
        begun = container.output.readline()
        if not begun:
            raise MeasurementError(f"the container did not begin: {container.log_tail()}")
        registered = kubelet.registered().at
        container.terminate()
        return container.began, float(begun), registered


def _row(figure: str, taken: list[float], bare: list[float], ratio_budget: float | None) -> Row:
    return Row(
        figure,
        "ms",
        len(taken),
        median(taken),
        percentile(taken, 99),
        bare=median(bare),
        ratio=median_ratio(taken, bare),
        ratio_budget=ratio_budget,
        series={"ms": taken, "bare_ms": bare},
    )
