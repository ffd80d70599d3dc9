"""Measure the time for which the driver has requested no recovery."""

from typing import Self

import msgspec

from gpu_plugin.devices.nvml_h import RecoveryAction
from gpu_plugin.health.latch import Moment, Span
from gpu_plugin.health.observation import CORE, Sample
from gpu_plugin.health.proof import clean
from gpu_plugin.health.signal import Context

# Seconds of clean looks after which it counts that the driver requests nothing.
# The driver may request a recovery late: NVIDIA's open kernel module logs the first RPC timeout as Xid 119 and marks
# the GPU for a reset at the third (kernel_gsp.c, RPC_TIMEOUT_GPU_RESET_THRESHOLD).
PROVEN_SECONDS = 120.0

GAP_SECONDS = 60.0  # between two clean looks that restart the time, also after a clock was set forward


class AsksNothing(msgspec.Struct, frozen=True):
    """The `seconds` for which all looks were clean and without a request, up to the last look at Unix time `at`."""

    seconds: Span = 0.0
    at: Moment | None = None

    @property
    def is_proven(self) -> bool:
        """True if the time is long enough to lower a verdict."""
        return self.seconds >= PROVEN_SECONDS

    def after(self, seen: Sample, ctx: Context) -> Self:
        """Return the state after a look. A look that did not request the recovery action changes nothing.

        A core reading that cannot be true restarts the time, as a request for a recovery or a look that is not clean does.
        """
        answer = clean(seen, ctx)
        if answer is None:
            return self
        unread = not seen.unknown.isdisjoint(CORE)
        if not answer or unread or seen.recovery_action != RecoveryAction.NONE:
            return type(self)()
        passed = -1.0 if self.at is None else ctx.now - self.at
        return type(self)(self.seconds + passed if 0 <= passed <= GAP_SECONDS else 0.0, ctx.now)


UNKNOWN = AsksNothing()
