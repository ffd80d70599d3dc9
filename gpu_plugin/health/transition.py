"""What everyone who reports on health is given: a verdict that became another."""

import msgspec

from gpu_plugin.health.latch import Verdict


class Transition(msgspec.Struct, frozen=True):
    """What a signal's verdict changed to: the event that everyone who reports on health is given.

    `uuid` is the GPU's; `device` and `part` are those of the latch's key. `since` is Unix time in seconds; `xid` the Xid
    behind it, if one is, and `xid_name` its name. `action` is what an operator is advised to do, empty once the verdict
    is OK. `standing` is the worst of all signals of the GPU, or that MIG device, after the change.
    """

    uuid: str
    signal: str
    verdict: Verdict
    before: Verdict
    detail: str
    since: float
    device: str = ""
    xid: int | None = None
    action: str = ""
    xid_name: str = ""
    standing: Verdict = Verdict.OK
    part: str = ""

    @property
    def healthy_again(self) -> bool:
        """Whether nothing is left that makes the GPU, or that MIG device, Unhealthy, where this did before."""
        return self.before is Verdict.FATAL and self.standing < Verdict.FATAL
