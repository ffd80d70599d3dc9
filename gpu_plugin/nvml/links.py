"""The links between the node's GPUs and the meshes they are in, as they were read last."""

import logging
from collections.abc import Iterable, Mapping

from gpu_plugin.devices.node import Link, Pair
from gpu_plugin.host.view import HostView
from gpu_plugin.nvml import topology
from gpu_plugin.nvml.port import Driver
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.nvml.watched import Watched
from gpu_plugin.runtime.slow_call import SlowCall

log = logging.getLogger(__name__)

# How often in a row a reading is repeated, a round later, in which something was refused for no lasting reason.
REPEATS = 2


class Links:
    """Reads them when asked to; what was known of GPUs that are out of reach still holds, one lost midway among them."""

    def __init__(self, driver: Driver, host: HostView, calls: DriverCalls) -> None:
        self._driver = driver
        self._host = host
        self._known: Mapping[Pair, Link] = {}
        self._cliques: Mapping[str, str] = {}
        self._reading: SlowCall[topology.LinkReading] = SlowCall(calls.begin)
        self._asked: frozenset[str] = frozenset()
        self._unread: set[str] = set()
        """GPUs that the newest reading is without, """
        self._away: set[str] = set()
        """and those of them that have been out of reach since: once one answers, there is something to read."""
        self._owed = False
        self._troubles: tuple[str, ...] = ()
        self._repeats = 0

    def between(self, uuids: Iterable[str]) -> dict[Pair, Link]:
        """Links between the GPUs with these uuids, by pair, as far as they are known."""
        wanted = frozenset(uuids)
        return {pair: link for pair, link in self._known.items() if wanted.issuperset(pair)}

    def cliques(self, uuids: Iterable[str]) -> dict[str, str]:
        """By uuid, the NVSwitch meshes that these GPUs are in, as far as they are known."""
        return {uuid: self._cliques[uuid] for uuid in uuids if uuid in self._cliques}

    def due(self, gpus: Iterable[Watched]) -> bool:
        """Whether they are to be read again: that was put off, or a GPU answers that had no part in the last reading."""
        answering = {each.gpu.uuid for each in gpus if _answers(each)}
        self._away |= self._unread - answering
        return self._owed or not self._away.isdisjoint(answering)

    def came(self) -> bool:
        """Takes in what a reading brought that was not waited for. Returns whether there was one."""
        if not self._reading.back:
            return False
        job = self._reading.take()
        error = job.done.exception()
        if error is None:
            self._take(job.done.result())
        else:
            log.error("the links between GPUs cannot be read; what is known of them holds: %r", error)
        return True

    async def read(self, gpus: Iterable[Watched], patience: float) -> None:
        """Asks for those between all GPUs that answer, for `patience` seconds; what takes longer comes some time."""
        self.came()
        if self._reading.begun:  # it may have begun before what this is to find
            self._owed = True
            return
        self._owed = False
        everyone = list(gpus)
        answering = [each for each in everyone if _answers(each)]
        handles = {each.gpu.uuid: each.handle for each in answering if each.handle is not None}
        described = [each.gpu for each in answering]
        self._asked = frozenset(handles)
        self._unread = {each.gpu.uuid for each in everyone} - self._asked
        self._away = set(self._unread)
        if len(described) < 2:
            return
        driver, host = self._driver, self._host
        self._reading.begin(lambda: topology.probe_links(driver, host, handles, described))
        await self._reading.wait(patience)
        if not self.came():
            log.error("the links between GPUs are not known yet; pods get GPUs without regard to what is unknown")

    def _take(self, found: topology.LinkReading) -> None:
        read = self._asked - found.lost
        self._known = {**self._known, **found.links}
        self._cliques = {uuid: word for uuid, word in self._cliques.items() if uuid not in read} | dict(found.cliques)
        self._unread |= found.lost
        for trouble in found.troubles:
            if trouble not in self._troubles:
                log.warning("%s", trouble)
        self._troubles = found.troubles
        self._repeats = self._repeats + 1 if found.troubles else 0
        self._owed |= 0 < self._repeats <= REPEATS


def _answers(watched: Watched) -> bool:
    return watched.pending is None and watched.handle is not None and not watched.gpu.unreadable
