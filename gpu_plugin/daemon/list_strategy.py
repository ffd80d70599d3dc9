"""The device list strategy where the operator leaves it to the node: `auto` becomes what the node's files speak for.

Looking at files may hang with the disk that they lie on, so it is done on a thread that is left behind then. What was chosen
before is used on, or envvar where nothing was. Where strategies are named, nothing is looked at.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpu_plugin.config.settings import Settings
from gpu_plugin.config.values import AUTO
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import NoAnswerError, begin

if TYPE_CHECKING:  # only those who leave the strategy to the node pay for what chooses it
    from gpu_plugin.containers.strategy_choice import Choice, NodeEvidence

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that looking at the node's files may take; it takes some 0.05."""


class ListStrategy:
    """Chooses strategies for settings that leave them to the node."""

    def __init__(self, look: "Callable[[Settings], NodeEvidence] | None" = None, patience: float = PATIENCE) -> None:
        """`look` blocks and gives what the node's files say."""
        self._look = look or evidence_for
        self._patience = patience
        self._looking: SlowCall[Choice] = SlowCall(partial(begin, name="node-files"))
        self._known: Choice | None = None

    async def settled(self, settings: Settings) -> Settings:
        """Settings with `auto` replaced by the strategies that it chooses. Waits for `PATIENCE` at most."""
        if AUTO not in settings.device_list_strategy:
            return settings
        choice = await self._choose(settings)
        return replace(
            settings, device_list_strategy=(choice.strategy,), device_list_strategy_reason=f"{AUTO}: {choice.reason}"
        )

    async def _choose(self, settings: Settings) -> "Choice":
        from gpu_plugin.containers.strategy_choice import choose  # noqa: PLC0415

        if self._looking.under_way:
            return self._without_a_look("an earlier look at the node's files still hangs")
        self._looking.forget()
        try:
            self._known = await self._looking.joined(
                lambda: choose(self._look(settings), settings.cdi_dir), self._patience
            )
        except NoAnswerError:  # a look may raise another TimeoutError of its own: ETIMEDOUT of a network's disk
            return self._without_a_look(f"the node's files could not be read within {self._patience:g} s")
        except Exception as error:
            log.exception("looking at the node's files failed")
            return self._without_a_look(f"looking at the node's files failed: {error!r}")
        return self._known

    def _without_a_look(self, why: str) -> "Choice":
        """What to use where the node's files say nothing now: a disk that is slow for a moment must not change what pods get."""
        from gpu_plugin.containers.strategy_choice import Choice  # noqa: PLC0415

        if self._known is None:
            return Choice("envvar", why)
        log.warning("device list strategy: still %s, as chosen before: %s", self._known.strategy, why)
        return self._known


def evidence_for(settings: Settings) -> "NodeEvidence":
    """What the files of this node say, seen as these settings say that it is mounted. Blocks."""
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


def tell(settings: Settings) -> None:
    """Says which strategy was chosen, and why; nothing where strategies are named."""
    if settings.device_list_strategy_reason:
        used = ", ".join(settings.device_list_strategy)
        log.info("device list strategy: %s (%s)", used, settings.device_list_strategy_reason)
