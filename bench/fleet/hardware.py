"""The true state of a GPU, and the driver's reports about it."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.fleet.faults import Incident, Truth
from bench.fleet.rates import ASSUMED, Part
from gpu_plugin.devices.node import Thresholds
from gpu_plugin.devices.nvml_h import FabricState, FabricSummary
from gpu_plugin.health.observation import Fabric, Facts, Fault, Sample

WATTS = 350
"""The mean power of a GPU in watts, by which its energy counter increases."""

LINKS = {Part.A100: 12, Part.H100: 18}
"""The number of NVLinks of each GPU model."""

FACTS = {
    Part.A100: Facts(Thresholds(92, 89, 95, 85), contains_errors=True, nvswitch=True, says_action=False),
    Part.H100: Facts(Thresholds(95, 89, 95, 87), contains_errors=True, nvswitch=True, says_action=True),
}
"""The plugin's facts about each GPU model, with recorded thresholds of such GPUs."""

_JOINED = Fabric(FabricState.COMPLETED, 0, 0, FabricSummary.HEALTHY)
_JOINING = Fabric(FabricState.IN_PROGRESS)

_WORDS = {Fault.LOST: "GPU is lost", Fault.HUNG: "no answer for 5 s", Fault.ERROR: "Unknown Error"}


@dataclass(slots=True)
class Hardware:
    """One GPU. Times are seconds of the virtual clock.

    `counting` is `Sample.counting` of the plugin's process. `energy_stays`: a reset of only the GPU does not change its energy
    counter. `counts_recoveries`: the driver counts failed recoveries of NVLinks. `heat_below` and `heat_spread` are the same as
    in `rates.Assumed`. `counts` are the counters of links and of the bus.
    """

    part: Part
    energy_stays: bool = False
    counting: int = 0
    counts_recoveries: bool = False
    heat_below: float = ASSUMED.heat_below
    heat_spread: float = ASSUMED.heat_spread
    counts: dict[str, int] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    counted_since: float = 0.0
    ecc: int = 0
    binding: int = 1
    last: str = ""
    number: int = 0
    """The kind and the number of the GPU's last incident."""

    @property
    def truth(self) -> Truth:
        """The true state of the GPU now."""
        return max((incident.truth for incident in self.incidents), default=Truth.SOUND)

    @property
    def cause(self) -> tuple[str, int]:
        """The kind and the number of the worst present incident, of equals the latest; without an incident, of the last one."""
        worst = max(reversed(self.incidents), key=lambda incident: incident.truth, default=None)
        return (worst.kind.name, worst.number) if worst else (self.last, self.number)

    @property
    def lost(self) -> bool:
        """Whether the driver has lost the GPU."""
        return any(incident.looks is Fault.LOST for incident in self.incidents)

    @property
    def unreachable(self) -> bool:
        """Whether the driver cannot describe the GPU, and this does not end by itself."""
        return any(incident.looks is not Fault.NONE and incident.ends == math.inf for incident in self.incidents)

    @property
    def gone(self) -> bool:
        """Whether the driver has lost the GPU or hangs on it, so that only the whole node can be reset."""
        return any(incident.looks in (Fault.LOST, Fault.HUNG) for incident in self.incidents)

    @property
    def silent(self) -> bool:
        """Whether it is broken only in ways that pods do not notice."""
        broken = [incident for incident in self.incidents if incident.truth is Truth.BROKEN]
        return bool(broken) and all(incident.kind.silent for incident in broken)

    def strike(self, incident: Incident) -> None:
        """Begin an incident."""
        self.incidents.append(incident)
        self.last, self.number = incident.kind.name, incident.number
        errors = incident.kind.reading.get("ecc_uncorrected", 0)
        assert isinstance(errors, int)
        self.ecc += errors

    def count(self, incident: Incident) -> None:
        """Increase the counters of an incident."""
        for name, errors in incident.counted().items():
            self.counts[name] = self.counts.get(name, 0) + errors

    def pass_by(self, now: float) -> None:
        """Remove the incidents that have ended by themselves."""
        self.incidents = [incident for incident in self.incidents if incident.ends > now]

    def reset(self, now: float) -> None:
        """Reset only the GPU. This is impossible while it is lost."""
        if self.lost:
            return
        self._mend("reset", now)
        if not self.energy_stays:
            self.counted_since = now

    def reboot(self, now: float) -> None:
        """Reboot the node."""
        self._mend("reboot", now)
        self.binding += 1
        self.counted_since = now

    def replaced(self, now: float) -> None:
        """Replace the GPU by another."""
        self._mend("replace", now)
        self.binding += 1
        self.counted_since = now

    def restart_counters(self, now: float) -> None:
        """Restart the counters, since no program had the driver open and persistence mode is off."""
        self.counted_since, self.ecc, self.counts = now, 0, {}

    def _mend(self, how: str, now: float) -> None:
        self.incidents = [incident for incident in self.incidents if not incident.mends[how]]
        for incident in self.incidents:
            incident.action = type(incident.action)(0)  # requested again if the incident shows again
        self.ecc, self.counts = 0, {}
        self.pass_by(now)

    def sample(self, now: float, *, loaded: bool) -> Sample:
        """Return the result of a look. `loaded`: pods run on the GPU."""
        for incident in self.incidents:
            if incident.looks is not Fault.NONE:
                return Sample(fault=incident.looks, detail=_WORDS[incident.looks])
        tells = self.part is Part.H100
        links = LINKS[self.part]
        seen = Sample(
            temperature=62 if loaded else 35,
            memory_temperature=70 if loaded else 40,
            energy=int(1000 * WATTS * (now - self.counted_since)) + 1,
            recovery_action=max((int(each.action_now(now)) for each in self.incidents), default=0) if tells else None,
            ecc_uncorrected=self.ecc,
            sram_threshold=False,
            remap_pending=False,
            remap_failure=False,
            unrepairable_memory=False,
            clocks_event_reasons=0,
            nvlinks=(True,) * links,
            nvlink_crc_errors=self.counts.get("nvlink_crc_errors", 0),
            nvlink_failed_recoveries=self.counts.get("nvlink_failed_recoveries", 0) if self.counts_recoveries else None,
            fabric=_JOINED if tells else None,
            pcie_width=16,
            pcie_max_width=16,
            pcie_replays=self.counts.get("pcie_replays", 0),
            pcie_fatal_errors=self.counts.get("pcie_fatal_errors", 0),
            binding=self.binding,
            counting=self.counting,
        )
        changes: dict[str, Any] = {}
        for incident in self.incidents:
            for name, value in incident.kind.reading.items():
                if name == "nvlinks":
                    changes[name] = tuple(at != value for at in range(links))
                elif name == "fabric":
                    changes[name] = _JOINING
                elif name == "temperature" and (loaded or incident.kind.name == "hot-room"):
                    changes[name] = self._temperature(incident, now)
                elif name in ("remap_pending", "remap_failure", "pcie_width"):
                    changes[name] = value
        return msgspec.structs.replace(seen, **changes) if changes else seen

    def _temperature(self, incident: Incident, now: float) -> int:
        """Return the temperature of a GPU that this incident makes hot. It is the same at the same time under every policy."""
        limits = FACTS[self.part].thresholds
        assert limits.shutdown is not None
        assert limits.slowdown is not None
        mean = limits.shutdown - self.heat_below if incident.truth is Truth.BROKEN else limits.slowdown
        return round(random.Random(f"{incident.number}/{now}").gauss(mean, self.heat_spread))
