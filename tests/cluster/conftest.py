"""One cluster for the whole session. A fixture restores it after each test."""

import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from tests.needed import REQUIRED, found
from tests.real import image_build

from .harness import binaries
from .harness.cluster import Cluster, last_logs
from .harness.guardian import OccupiedError
from .harness.layout import Layout
from .harness.node import foreign_files
from .harness.plugin import GPUS
from .harness.process import PieceError
from .harness.release import IMAGE, IMAGES, LABEL, PRESENT, Release
from .harness.sweep import LeftoverError
from .harness.wait import DeadlineError

TEST_TIMEOUT = 180
"""Time limit in seconds for one test without its fixtures. Every wait in a test has a shorter deadline."""

PLUGIN = Path(os.environ.get("E2E_PLUGIN") or Path(sys.executable).parent / "gpu-plugin")


def obstacle() -> str:
    """Return the reason why a cluster cannot run on this machine; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"a kubelet needs Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "a kubelet needs root"
    if strangers := foreign_files(Layout()):
        return strangers
    try:
        binaries.find()
    except binaries.MissingError as missing:
        return f"{missing}; E2E_INSTALL=1 make e2e installs them"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if config.pluginmanager.hasplugin("timeout"):
        for item in ours:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT, func_only=True))
    if not ours or config.option.collectonly:
        return
    if reason := obstacle():
        if REQUIRED or len(ours) == len(items):
            pytest.exit(f"no cluster tests: {reason}", returncode=1 if REQUIRED else 0)
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"no cluster tests: {reason}"))
    elif not PLUGIN.exists():
        pytest.exit(f"no cluster tests: {PLUGIN} is not there; make install", returncode=1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    del call
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, Cluster):
        node = (cluster.containerd, cluster.kubelet, cluster.plugin)
        report.sections += [(f"end of the log of {piece.name}", piece.log_tail()) for piece in node]
        report.sections.append(("whole logs of this run, once it has ended", str(last_logs())))
    return report


@pytest.fixture(scope="session")
def _end_in_order() -> Iterator[None]:
    """End the session on SIGTERM as on Ctrl-C, with the teardown of every fixture."""

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        pytest.exit(f"ended by {signal.Signals(number).name}", returncode=128 + number)

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def _running_cluster(_end_in_order: None) -> Iterator[Cluster]:
    try:
        with Cluster(binaries.find(), PLUGIN) as cluster:
            yield cluster
    except (PieceError, DeadlineError, OccupiedError, LeftoverError, OSError) as error:
        pytest.exit("\n".join([f"no cluster: {error}", *getattr(error, "__notes__", [])]), returncode=1)


@pytest.fixture
def cluster(_running_cluster: Cluster) -> Iterator[Cluster]:
    """The running cluster, healthy and without pods. It is repaired after the test."""
    cluster = _running_cluster
    log_begins = cluster.plugin.log_size()
    yield cluster
    wrong = [f"{piece.name} ended by itself" for piece in cluster.pieces if piece.crashed]
    for piece in cluster.pieces:
        if not piece.running:
            piece.start()
    cluster.pods.delete_all()
    cluster.plugin.heal_all()
    if cluster.plugin.altered:
        cluster.plugin.restart_as_usual()
    cluster.remove_former_resources()
    cluster.wait_usual()
    log = cluster.plugin.log_since(log_begins)
    if "Traceback" in log:
        wrong.append(f"the daemon logged a failure that it did not foresee:\n{log}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="session")
def image(_running_cluster: Cluster) -> str:
    """Import the plugin's image into containerd: tag 1 has this version, tag 2 the next version."""
    for tag, version in IMAGES:
        _running_cluster.containerd.import_archive(found(partial(image_build.find, tag, version)))
    return IMAGE


@pytest.fixture
def release(cluster: Cluster, image: str) -> Iterator[Release]:
    """A release of the chart, for the test to install. No other plugin runs on the cluster's node during the test."""
    del image
    made = Release(cluster, found(partial(binaries.find_tool, "helm")))
    cluster.plugin.stop()
    cluster.wait_allocatable(0)  # otherwise the scheduler could assign a pod whose GPUs no plugin serves
    cluster.label_node(PRESENT, "true")
    yield made
    made.uninstall()
    cluster.label_node(PRESENT, None)
    cluster.label_node(LABEL, None)
    assert "Traceback" not in made.log()


@pytest.fixture(scope="session")
def numbers(_running_cluster: Cluster) -> dict[str, int]:
    """The GPU number of each device id, found with pods of one GPU: the N of their /dev/nvidiaN."""
    pods = _running_cluster.pods
    names = [f"number-{count}" for count in range(GPUS)]
    for name in names:
        pods.create(name, gpus=1)
    found = {}
    for name in names:
        pod = pods.wait_running(name)
        (device_id,) = pod.device_health
        (found[device_id],) = pods.gpu_numbers(pod)
    pods.delete(*names)
    return found
