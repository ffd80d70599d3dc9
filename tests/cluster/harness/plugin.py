"""The device plugin daemon as one more host process, on a simulated node whose GPUs can be made to fail."""

from pathlib import Path
from typing import ClassVar

from .layout import Layout
from .process import Piece, run

SIMULATED_NODE = "hgx-h100"
RESOURCE = "nvidia.com/gpu"
GPUS = 8


class Plugin(Piece):
    """`gpu-plugin run`, always with the same state directory.

    `extra` arguments come after the usual ones, for what one test wants different.
    """

    name: ClassVar[str] = "gpu-plugin"
    stops_within: ClassVar[float] = 5.0

    def __init__(self, layout: Layout, program: Path) -> None:
        super().__init__(layout)
        self._program = program
        self.state_dir = layout.plugin_state
        self.extra: tuple[str, ...] = ()
        self._faulty: set[int] = set()

    def command(self) -> list[str]:
        return [
            str(self._program),
            "run",
            f"--simulate={SIMULATED_NODE}",
            f"--state-dir={self.state_dir}",
            "--pass-device-specs",
            "--health-poll-interval=500ms",
            "--temperature-recovery=2s",
            "--log-level=debug",
            *self.extra,
        ]

    def prepare(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)

    def fault(self, gpu: int, *arguments: str) -> None:
        """Make GPU number `gpu` fail, as in `fault(3, "--xid=79")`.

        Raises:
            PieceError: the command line refused.
        """
        self._faulty.add(gpu)
        self._simulate(gpu, *arguments)

    def heal(self, gpu: int) -> None:
        """Repair and reset GPU number `gpu`."""
        self._simulate(gpu, "--heal")
        self._faulty.discard(gpu)

    def heal_all(self) -> None:
        """Heal every GPU that `fault` made fail."""
        for gpu in sorted(self._faulty):
            self.heal(gpu)

    def _simulate(self, gpu: int, *arguments: str) -> None:
        run([str(self._program), "fault", f"--state-dir={self.state_dir}", f"--gpu={gpu}", *arguments])
