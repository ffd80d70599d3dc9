"""Answer the commands of operators on the control socket."""

import logging
from collections.abc import Mapping
from pathlib import Path

import anyio

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.daemon.event_log import LOGGED_VERBS, EventLog
from gpu_plugin.daemon.node_view import NodeView
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.opened_state import make_way
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.daemon.status_answers import StatusAnswers
from gpu_plugin.daemon.takeover import Takeover
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.control.server import Verb, serve
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.supervision import FIRST_RETRY, LONGEST_RETRY

log = logging.getLogger(__name__)


class Commands:
    """Answers the commands of operators while `run` runs.

    Attributes:
        check_socket: ring it when the control socket may be gone.
    """

    def __init__(
        self,
        state_dir: Path,
        simulated: Mapping[str, Verb],
        operations: Operations,
        view: NodeView,
        answers: StatusAnswers,
        events: EventLog,
        takeover: Takeover,
        now: Now,
    ) -> None:
        """`simulated` has the commands that only a simulated driver has."""
        self.check_socket = Pulse()
        self._state_dir = state_dir
        self._events = events
        self._takeover = takeover
        self._now = now
        verbs = {name: self._then_poll(verb) for name, verb in simulated.items()}
        verbs |= operations.verbs
        self._verbs = {
            name: events.order(name, self._after_takeover(verb)) if name in LOGGED_VERBS else events.resolved(verb)
            for name, verb in verbs.items()
        }
        self._verbs |= {"status": answers.status, "topology": view.topology, "events": events.answer}

    async def run(self) -> None:
        """Serve the control socket, and make it again when it is gone. Never returns."""
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        while True:
            make_way(self._state_dir)
            try:
                async with serve(self._state_dir, self._verbs) as is_present:
                    backoff.succeeded()
                    while is_present():
                        await self.check_socket.wait(LONGEST_RETRY)
                log.warning("the control socket was removed, renamed or replaced: it is made again")
            except ConfigError as error:
                log.warning("commands cannot reach this daemon: %s", error)
                await anyio.sleep(backoff.failed(anyio.current_time()))

    def _after_takeover(self, verb: Verb) -> Verb:
        """Return a verb that first waits until no former daemon can get the node back."""

        async def ordered(request: Mapping[str, object]) -> Mapping[str, object]:
            await self._takeover.takes_orders.wait()
            return await verb(request)

        return ordered

    def _then_poll(self, verb: Verb) -> Verb:
        """Return a verb after which all GPUs are polled at once, so that its effect shows soon."""

        async def acted(request: Mapping[str, object]) -> Mapping[str, object]:
            reply = await verb(request)
            if self._now.monitor is not None:
                self._now.monitor.look_now()
            return reply

        return acted
