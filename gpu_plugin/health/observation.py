"""What was seen of one GPU: the only input of the health decisions. Immutable."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a GPU.

    `fault` is empty where the driver answered; otherwise `lost` (NVML's GPU_IS_LOST), `reset-required` (RESET_REQUIRED),
    `hung` (no answer within the time allowed) or `error` (anything else), with the driver's words in `detail`.
    `temperature` is in °C, `energy` in mJ since the driver was last loaded; None where the part does not say.
    """

    temperature: int | None = None
    energy: int | None = None
    fault: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class XidEvent:
    """The driver reported an Xid on this GPU."""

    xid: int


Observation = Sample | XidEvent
