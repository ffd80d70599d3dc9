"""The part of a kubelet that decides which pod holds a device, without I/O: pods, the device manager's memory and its checkpoint.

Sources: pkg/kubelet/cm/devicemanager/manager.go (writeCheckpoint, readCheckpoint, UpdateAllocatedDevices,
genericDeviceUpdateCallback), pkg/kubelet/apis/podresources/server_v1.go (List).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

Key = tuple[str, str]


@dataclass
class ModelKubelet:
    """`pods` have, by uid, what app containers and what plain init containers were given; they outlive `start`.

    `memory` is what the device manager counts and `file` what it last wrote, both by uid; `healthy` is what the newest lists say
    by resource, None for a resource whose plugin has not registered since the start. `process` is the number of the start.
    """

    pods: dict[str, tuple[frozenset[Key], frozenset[Key]]] = field(default_factory=dict)
    memory: dict[str, frozenset[Key]] = field(default_factory=dict)
    file: dict[str, frozenset[Key]] = field(default_factory=dict)
    healthy: dict[str, frozenset[str]] = field(default_factory=dict)
    process: int = 1
    knows_pods: bool = True
    writes: int = 0
    unwritten: set[str] = field(default_factory=set)
    """Pods whose containers wait for the devices of other plugins: written down, listed and started only after that."""
    _uids: int = 0

    def start(self) -> None:
        """Another process: it has the file, and knows neither pods nor plugins."""
        self.process += 1
        for uid in self.unwritten:  # no container of theirs has begun
            self.pods.pop(uid, None)
        self.unwritten.clear()
        self.knows_pods = False
        self.memory = dict(self.file)
        self.healthy = {}

    def collect(self) -> None:
        if self.knows_pods:
            self.memory = {uid: keys for uid, keys in self.memory.items() if uid in self.pods}

    def write(self) -> None:
        self.file = dict(self.memory)
        self.writes += 1

    def receive(self, lists: Mapping[str, Collection[str]]) -> None:
        """Takes the healthy ids of some resources; each list has the file written."""
        if lists:
            self.healthy |= {name: frozenset(ids) for name, ids in lists.items()}
            self.write()

    @property
    def free(self) -> list[Key]:
        """The free devices, in order."""
        self.collect()
        taken = {key for keys in self.memory.values() for key in keys}
        return sorted({(name, one) for name, ids in self.healthy.items() for one in ids} - taken)

    def admit(self, app: Collection[Key], init: Collection[Key], *, slow: bool = False) -> str:
        """A pod is given these, which must be free; its uid. `slow`: `begin` comes later, after other plugins' devices."""
        self._uids += 1
        uid = str(self._uids)
        self.pods[uid] = (frozenset(app), frozenset(init))
        self.memory[uid] = frozenset((*app, *init))
        if slow:
            self.unwritten.add(uid)
        else:
            self.write()
        return uid

    def begin(self) -> None:
        """The pods that waited for other plugins have all they need."""
        if self.unwritten:
            self.unwritten.clear()
            self.write()

    def listed(self) -> frozenset[Key]:
        """What PodResources answers."""
        self.collect()
        pods = self.pods.items() if self.knows_pods else ()
        return frozenset(
            key
            for uid, (app, _) in pods
            if uid not in self.unwritten
            for key in app & self.memory.get(uid, frozenset())
        )

    def written(self) -> Mapping[Key, frozenset[str]]:
        """The content of the checkpoint, in the form of `checkpoint.read`."""
        found: dict[Key, set[str]] = {}
        for uid, keys in self.file.items():
            for key in keys:
                found.setdefault(key, set()).add(uid)
        return {key: frozenset(uids) for key, uids in found.items()}

    @property
    def held(self) -> frozenset[Key]:
        """The devices that pods really hold."""
        return frozenset(key for app, init in self.pods.values() for key in app | init)
