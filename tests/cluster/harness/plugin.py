"""The device plugin daemon as a host process, on a simulated node. Tests can make its GPUs fail."""

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
    """`gpu-plugin run`. The same simulated node always has the same state directory.

    Attributes that a test may change, which the next start applies:
        extra: arguments after the usual arguments.
        simulate: another simulated node, a name or a file.
        config: the content of the config file, which `rewrite` changes later.
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
        """The daemon's --state-dir, with the simulated node, the health verdicts and the listed devices."""
        return self.layout.plugin_states / Path(self.simulate).stem

    @property
    def altered(self) -> bool:
        """True if a test changed the attributes."""
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
            "--flap-guard=0s",  # all tests use one daemon, so each GPU fails more often within an hour than a healthy GPU
            "--log-level=debug",
            *([f"--config-file={self._config_file}"] if self.config else []),
            *self.extra,
        ]

    def prepare(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        if self.config:
            self.rewrite(self.config)

    def rewrite(self, config: str) -> None:
        """Change the content of the running daemon's config file without notifying the daemon."""
        self.config = config
        self._config_file.parent.mkdir(exist_ok=True)
        self._config_file.write_text(config)

    def restart_as_usual(self) -> None:
        """Reset the attributes, remove the state directories and restart. No pod may hold a device then."""
        self.stop()
        shutil.rmtree(self.layout.plugin_states)
        self.extra, self.simulate, self.config = (), SIMULATED_NODE, ""
        self.start()

    def fault(self, gpu: int, *arguments: str) -> None:
        """Make GPU number `gpu` fail, as in `fault(3, "--xid=79")`.

        Raises:
            PieceError: the command refused the fault.
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
        """Run `gpu-plugin cordon` or another verb on GPU number `gpu`."""
        run([str(self._program), verb, f"--state-dir={self.state_dir}", str(gpu)])

    def explain(self, gpu: int) -> dict[str, Any]:
        """Return GPU number `gpu` of the status."""
        return dict(next(each for each in self.status()["gpus"] if each["index"] == gpu))

    def status(self) -> dict[str, Any]:
        """Return the output of `gpu-plugin status --json`."""
        command = [str(self._program), "status", f"--state-dir={self.state_dir}", "--json"]
        return dict(json.loads(run(command, may_end_with=1)))  # the exit status if the node has problems

    def topology(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the links of `gpu-plugin topology --json` by pair of GPU numbers, the lower number first."""
        output = run([str(self._program), "topology", f"--state-dir={self.state_dir}", "--json"])
        return {(link["a"], link["b"]): link for link in json.loads(output)["links"]}

    @property
    def _config_file(self) -> Path:
        return self.layout.plugin_configs / "config.yaml"

    def _simulate(self, gpu: int, *arguments: str) -> None:
        run([str(self._program), "fault", f"--state-dir={self.state_dir}", f"--gpu={gpu}", *arguments])
