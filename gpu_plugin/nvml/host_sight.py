"""What the host says beside the driver: asked on a thread, one question at a time, and a value when it is answered."""

import logging
from collections.abc import Mapping

import msgspec

from gpu_plugin.nvml.calls import DriverCalls
from gpu_plugin.nvml.port import HostView
from gpu_plugin.runtime.slow_call import SlowCall

log = logging.getLogger(__name__)


class HostSight(msgspec.Struct, frozen=True):
    """What the host said at one time. None: it was not asked, or could not tell."""

    device_nodes: frozenset[str]
    mig_minors: Mapping[str, int] | None
    bindings: Mapping[str, int] | None
    boot_id: str


class HostWatch:
    """Asks the host; while one question is under way there is no other."""

    def __init__(self, host: HostView, calls: DriverCalls) -> None:
        self._host = host
        self._asking: SlowCall[HostSight] = SlowCall(calls.begin_unrelated)

    async def see(self, patience: float, *, sliced: bool) -> HostSight | None:
        """What the host says now, within `patience` seconds; the minors of MIG devices only where GPUs are `sliced`.

        None where it cannot be asked, or takes longer: its answer is then what the next call gives.
        """
        host = self._host
        try:
            return await self._asking.joined(lambda: _see(host, sliced=sliced), patience)
        except Exception as error:  # noqa: BLE001 - whatever it is, what is known of the host holds
            log.debug("the host cannot be asked: %r", error)
            return None


def _see(host: HostView, *, sliced: bool) -> HostSight:
    """Blocks."""
    try:
        bindings = host.bindings()
    except OSError as error:
        log.debug("the driver's bindings cannot be read now: %s", error)
        bindings = None
    return HostSight(host.device_nodes(), host.mig_minors() if sliced else None, bindings, host.boot_id())
