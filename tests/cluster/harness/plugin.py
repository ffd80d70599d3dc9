"""The device plugin daemon as one more host process, on a simulated node whose GPUs can be made to fail."""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

from .layout import Layout
from .process import Piece, run

SIMULATED_NODE = "hgx-h100"
RESOURCE = "nvidia.com/gpu"
GPUS = 8


class Plugin(Piece):
    """`gpu-plugin run`, always with the same state directory for the same simulated node.

    What one test wants different, from the next start on: `extra` arguments come after the usual ones; `simulate` is
    another simulated node, a name or a file; `config` is the content of its config file, which `rewrite` changes later.
    """

    name: ClassVar[str] = "gpu-plugin"
    stops_within: ClassVar[float] = 5.0

    def __init__(self, layout: Layout, program: Path) -> None:
        super().__init__(layout)
        self._program = program
        self.extra: tuple[str, ...] = ()
        self.simulate = SIMULATED_NODE
        self.config = ""
        self._faulty: set[int] = set()

    @property
    def state_dir(self) -> Path:
        """The daemon's --state-dir: the simulated node, the health verdicts and what was listed."""
        return self.layout.plugin_states / Path(self.simulate).stem

    @property
    def altered(self) -> bool:
        """Whether a test wanted something different."""
        return bool(self.extra or self.config) or self.simulate != SIMULATED_NODE

    def command(self) -> list[str]:
        return [
            str(self._program),
            "run",
            f"--simulate={self.simulate}",
            f"--state-dir={self.state_dir}",
            f"--pod-resources-socket={self.layout.pod_resources}",
            "--pass-device-specs",
            "--health-poll-interval=500ms",
            "--temperature-recovery=2s",
            "--flap-guard=0s",  # one daemon for all tests: each GPU fails more often within an hour than a sound one does
            "--log-level=debug",
            *([f"--config-file={self._config_file}"] if self.config else []),
            *self.extra,
        ]

    def prepare(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        if self.config:
            self.rewrite(self.config)

    def rewrite(self, config: str) -> None:
        """Change the content of the config file under the running daemon, which is told nothing."""
        self.config = config
        self._config_file.parent.mkdir(exist_ok=True)
        self._config_file.write_text(config)

    def restart_as_usual(self) -> None:
        """Undo what the test wanted different, and forget what was listed meanwhile: no pod may be left."""
        self.stop()
        shutil.rmtree(self.layout.plugin_states)
        self.extra, self.simulate, self.config = (), SIMULATED_NODE, ""
        self.start()

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

    def operate(self, verb: str, gpu: int) -> None:
        """`gpu-plugin cordon` or another verb about GPU number `gpu`."""
        run([str(self._program), verb, f"--state-dir={self.state_dir}", f"--gpu={gpu}"])

    def explain(self, gpu: int) -> dict[str, Any]:
        """What `gpu-plugin explain --json` says of GPU number `gpu`."""
        command = [str(self._program), "explain", f"--state-dir={self.state_dir}", f"--gpu={gpu}", "--json"]
        said = run(command, may_end_with=1)  # the GPU is Unhealthy
        (told,) = json.loads(said)["gpus"]
        return dict(told)

    def status(self) -> dict[str, Any]:
        """What `gpu-plugin status --json` says."""
        command = [str(self._program), "status", f"--state-dir={self.state_dir}", "--json"]
        return dict(json.loads(run(command, may_end_with=1)))  # something is wrong, and said

    def topology(self) -> dict[tuple[int, int], dict[str, Any]]:
        """What `gpu-plugin topology --json` says of every pair of GPUs, by their numbers, the lower first."""
        said = run([str(self._program), "topology", f"--state-dir={self.state_dir}", "--json"])
        return {(link["a"], link["b"]): link for link in json.loads(said)["links"]}

    @property
    def _config_file(self) -> Path:
        return self.layout.plugin_configs / "config.yaml"

    def _simulate(self, gpu: int, *arguments: str) -> None:
        run([str(self._program), "fault", f"--state-dir={self.state_dir}", f"--gpu={gpu}", *arguments])
