"""Replace the device list strategy `auto` by the strategy that suits the node's files.

The read of the files may hang together with their disk. It runs on a thread, which is abandoned if it hangs. Then the last
chosen strategy stays in use, or envvar before the first choice. If the operator names strategies, no file is read.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpu_plugin.config.settings import Settings
from gpu_plugin.config.values import AUTO
from gpu_plugin.runtime.threads import NoAnswerError, SlowCall

if TYPE_CHECKING:  # these modules are imported at run time only for the strategy `auto`
    from gpu_plugin.containers.strategy_choice import Choice, NodeEvidence

log = logging.getLogger(__name__)

PATIENCE = 3.0  # seconds that the read of the node's files may take; it usually takes 0.05


class ListStrategy:
    """Chooses the strategy for settings with the strategy `auto`."""

    def __init__(self, read: "Callable[[Settings], NodeEvidence] | None" = None, patience: float = PATIENCE) -> None:
        """`read` blocks and returns the evidence in the node's files. `patience`, in seconds, limits each wait for it."""
        self._read = read or evidence_for
        self._patience = patience
        self._reading: SlowCall[Choice] = SlowCall("node-files")
        self._known: Choice | None = None

    async def settled(self, settings: Settings) -> Settings:
        """Return the settings with `auto` replaced by the chosen strategy. Waits at most `patience` seconds for the files."""
        if AUTO not in settings.device_list_strategy:
            return settings
        choice = await self._choose(settings)
        return replace(
            settings, device_list_strategy=(choice.strategy,), device_list_strategy_reason=f"{AUTO}: {choice.reason}"
        )

    async def _choose(self, settings: Settings) -> "Choice":
        from gpu_plugin.containers.strategy_choice import choose  # noqa: PLC0415

        if self._reading.under_way:
            return self._fallback("an earlier read of the node's files still hangs")
        self._reading.forget()
        try:
            self._known = await self._reading.joined(
                lambda: choose(self._read(settings), settings.cdi_dir), self._patience
            )
        except NoAnswerError:  # the read itself may raise another TimeoutError: ETIMEDOUT of a network disk
            return self._fallback(f"the node's files could not be read within {self._patience:g} s")
        except Exception as error:
            log.exception("the read of the node's files failed")
            return self._fallback(f"the read of the node's files failed: {error!r}")
        return self._known

    def _fallback(self, why: str) -> "Choice":
        """Return the former choice, or envvar before the first choice: a slow disk must not change the strategy for pods."""
        from gpu_plugin.containers.strategy_choice import Choice  # noqa: PLC0415

        if self._known is None:
            return Choice("envvar", why)
        log.warning("device list strategy: still %s, as chosen before: %s", self._known.strategy, why)
        return self._known


def evidence_for(settings: Settings) -> "NodeEvidence":
    """Return the evidence in the node's files. `settings` says where the node's root directory is mounted. Blocks."""
    from gpu_plugin.containers.node_files.evidence import host_root, look  # noqa: PLC0415
    from gpu_plugin.containers.strategy_choice import NodeEvidence  # noqa: PLC0415

    root = host_root(settings)
    if root is None:
        return NodeEvidence(
            trouble="this process is in a container, and the node's root directory is not mounted there: mount it at "
            f"--driver-root-ctr-path ({settings.driver_root_ctr_path}), with --driver-root /"
        )
    directory = settings.socket_dir.rstrip("/").rpartition("/")[0] or "/"
    return look(root, directory)


def log_strategy(settings: Settings) -> None:
    """Log the chosen strategy and the reason. Log nothing if the operator named the strategies."""
    if settings.device_list_strategy_reason:
        used = ", ".join(settings.device_list_strategy)
        log.info("device list strategy: %s (%s)", used, settings.device_list_strategy_reason)
