"""The links between the node's GPUs, as they were read last."""

import logging
from collections.abc import Iterable, Mapping

from gpu_plugin.devices.node import Link, Pair
from gpu_plugin.nvml import probe
from gpu_plugin.nvml.calls import DriverCalls
from gpu_plugin.nvml.port import Driver
from gpu_plugin.nvml.watched import Watched
from gpu_plugin.threads import Job

log = logging.getLogger(__name__)


class Links:
    """Reads them when asked to; what was known of GPUs that are out of reach still holds."""

    def __init__(self, driver: Driver, calls: DriverCalls) -> None:
        self._driver = driver
        self._calls = calls
        self._known: Mapping[Pair, Link] = {}
        self._reading: Job[dict[Pair, Link]] | None = None
        self.owed = False
        """Whether they are to be read again."""

    def between(self, uuids: Iterable[str]) -> dict[Pair, Link]:
        """Those between these GPUs, as far as they are known."""
        wanted = frozenset(uuids)
        return {pair: link for pair, link in self._known.items() if wanted.issuperset(pair)}

    def came(self) -> bool:
        """Takes in what a reading brought that was not waited for. Returns whether there was one."""
        if self._reading is None or not self._reading.done.done():
            return False
        job, self._reading = self._reading, None
        error = job.done.exception()
        if error is None:
            self._known = {**self._known, **job.done.result()}
        else:
            log.error("the links between GPUs cannot be read; what is known of them holds: %r", error)
        return True

    async def read(self, gpus: Iterable[Watched], patience: float) -> None:
        """Asks for those between all GPUs that answer, for `patience` seconds; what takes longer comes some time."""
        self.came()
        if self._reading is not None:  # it may have begun before what this is to find
            self.owed = True
            return
        self.owed = False
        answering = [each for each in gpus if each.pending is None and not each.gpu.unreadable]
        readable = {each.gpu.uuid: each.handle for each in answering if each.handle is not None}
        described = [each.gpu for each in answering if each.gpu.uuid in readable]
        if len(described) < 2:
            return
        self._reading = await self._calls.submit(lambda: probe.probe_links(self._driver, readable, described), patience)
        if not self.came():
            log.error("the links between GPUs are not known yet; pods get GPUs without regard to what is unknown")
