"""The steps of the demo, and how they are printed. All numbers shown are measured and all outcomes are received."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO, TypeVar

from demo.daemon_process import DaemonProcess
from demo.stand_in_kubelet import Admission, AdmissionError, Allocation, Event, EventKind, StandInKubelet
from gpu_plugin.runtime import control
from gpu_plugin.simulation.profile import Profile

T = TypeVar("T")

RESOURCE = "nvidia.com/gpu"
HEALTH_POLL = "200ms"
TEMPERATURE_RECOVERY = "1s"

STEP_SECONDS = 8.0  # Longest wait for a step: several times the duration on a busy machine

KUBELET_AWAY = 0.5  # Seconds between the end of a kubelet and the start of the next

_APPLICATION_XID = 31  # MMU fault: an application's own error
_FATAL_XID = 79  # the GPU has fallen off the bus
_TOO_HOT = 96  # °C
_COOL = 40  # °C
_UNFIT = "is Unhealthy: "  # in the log


# Colours, as parameters of ANSI's select graphic rendition
BAD = "31;1"
GOOD = "32;1"
DIM = "2"
BOLD = "1"


class Timeline:
    """A line for each step with its time, its duration and a text. Colours only on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._colours = out.isatty() and "NO_COLOR" not in os.environ
        self._begun = time.perf_counter()
        self.steps = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begun

    def say(self, text: str = "", colour: str = "") -> None:
        """Print lines without changes."""
        self._out.write(self._paint(text, colour) + "\n")
        self._out.flush()

    def step(self, what: str, text: str, took: float | None = None, colour: str = "") -> None:
        """Print the step that has just happened; `took` in seconds."""
        self.steps += 1
        duration = "" if took is None else milliseconds(took)
        first, *more = text.split("\n")
        self.say(f"{self.elapsed:6.2f} s {duration:>9}  {self._paint(f'{what:<12}', colour or BOLD)} {first}")
        for line in more:
            self.say(f"{'':33}{line}")

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours and colour else text


class StepFailedError(Exception):
    """A step of the demo did not happen; the text is the expected result."""


class Scenario:
    """The steps, in order. Each prints its result or raises StepFailedError."""

    def __init__(
        self, timeline: Timeline, kubelet: StandInKubelet, daemon: DaemonProcess, profile: Profile, state: Path
    ) -> None:
        self._timeline = timeline
        self._kubelet = kubelet
        self._daemon = daemon
        self._state = state
        self._profile = profile
        self._index = {gpu.uuid: index for index, gpu in enumerate(self._profile.gpus)}

    async def play(self, started: float) -> None:
        """Play all steps; `started` is time.perf_counter() at the daemon's start."""
        await self._register(started)
        for name, count in (("notebook", 1), ("finetune", 2), ("train", 4)):
            await self._admit(name, count)
        finetune = self._gpus(self._kubelet.pods["finetune"].ids(RESOURCE))
        train = self._gpus(self._kubelet.pods["train"].ids(RESOURCE))
        await self._application_xid(train[0])
        await self._fatal_xid(finetune[0])
        await self._overheat(train[1])
        await self._heal(finetune[0])
        await self._restart_kubelet()
        await self._admit("late", 1)
        await self._stop()

    # Steps

    async def _register(self, started: float) -> None:
        listed = await self._until(lambda: self._event(EventKind.LIST), f"the daemon registers {RESOURCE}")
        register, answered = self._event(EventKind.REGISTER), self._event(EventKind.REGISTERED)
        opened = self._event(EventKind.STREAM_OPENED)
        assert register
        assert answered
        assert opened
        self._timeline.step(
            "register",
            f"{RESOURCE} by process {register.pid}, timed from its start\n"
            f"the kubelet dialled back and answered in {milliseconds(answered.at - register.at)}",
            register.at - started,
        )
        state = self._kubelet.resources[RESOURCE]
        want = {gpu.uuid: (gpu.numa_node,) for gpu in self._profile.gpus}
        if state.numa != want:
            raise StepFailedError(f"the list should name {want}, it names {state.numa}")
        nodes = sorted({node for numa in want.values() for node in numa})
        places = ", ".join(f"NUMA node {n}: {self._name(u for u, numa in want.items() if n in numa)}" for n in nodes)
        self._timeline.step(
            "list", f"{state.allocatable} of {state.capacity} devices Healthy; {places}", listed.at - opened.at
        )

    async def _admit(self, name: str, count: int) -> None:
        admission = await self._admitted(name, count)
        given = admission.only
        visible = given.response.envs.get("NVIDIA_VISIBLE_DEVICES", "")
        if set(visible.split(",")) != set(given.ids):
            raise StepFailedError(
                f"the container of {name} sees GPUs {list(given.ids)}: its environment has {visible!r}"
            )
        shown = f"={visible}" if count == 1 else f" names the {count}"
        self._timeline.step(
            f"pod of {count}",
            f"{name} gets {self._name(given.ids)}: {self._place(given.ids)}\n{self._reason(given)}\n"
            f"its container's NVIDIA_VISIBLE_DEVICES{shown}",
            admission.seconds,
        )

    async def _application_xid(self, gpu: int) -> None:
        mark = len(self._kubelet.events)
        command = ["fault", "--state-dir", str(self._state), "--gpu", str(gpu), "--xid", str(_APPLICATION_XID)]
        begun = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpu_plugin", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        took = time.perf_counter() - begun
        if process.returncode:
            raise StepFailedError(f"`gpu-plugin {' '.join(command)}` works: it says {output.decode().strip()!r}")
        uuid = self._profile.gpus[gpu].uuid
        message = await self._until(
            lambda: next((m for m in self._daemon.messages if uuid in m and f"Xid {_APPLICATION_XID}" in m), ""),
            f"the daemon says that it counted Xid {_APPLICATION_XID}",
        )
        if self._event(EventKind.LIST, mark):
            raise StepFailedError(f"Xid {_APPLICATION_XID} changes nothing: a list was sent")
        self._timeline.step(
            f"Xid {_APPLICATION_XID}",
            f"`gpu-plugin fault --gpu {gpu} --xid {_APPLICATION_XID}` changes nothing: no list was sent\n"
            f"the daemon says: {self._short(message)}\nthe time is the whole command's, Python's start included",
            took,
        )

    async def _fatal_xid(self, gpu: int) -> None:
        event, took = await self._fault(gpu, "Unhealthy", xid=_FATAL_XID)
        self._timeline.step(
            f"Xid {_FATAL_XID}",
            f"GPU {gpu} Unhealthy at the kubelet, the other {len(self._profile.gpus) - len(event.changed)} as before; "
            f"timed from telling the daemon\nthe daemon says: {await self._log_line_about(gpu)}\n{self._status(gpu)}",
            took,
            BAD,
        )

    async def _overheat(self, gpu: int) -> None:
        limit = self._profile.gpus[gpu].thresholds.shutdown
        event, took = await self._fault(gpu, "Unhealthy", temperature=_TOO_HOT)
        self._timeline.step(
            "overheated",
            f"GPU {gpu} at {_TOO_HOT} °C, which shuts down at {limit} °C: Unhealthy, the other "
            f"{len(self._profile.gpus) - len(event.changed)} as before\n"
            f"the daemon looks every {HEALTH_POLL}, and says: {await self._log_line_about(gpu)}",
            took,
            BAD,
        )
        _, took = await self._fault(gpu, "Healthy", temperature=_COOL)
        self._timeline.step(
            "cooled down",
            f"GPU {gpu} at {_COOL} °C: Healthy again, which takes {TEMPERATURE_RECOVERY} of staying cool",
            took,
            GOOD,
        )

    async def _heal(self, gpu: int) -> None:
        _, took = await self._fault(gpu, "Healthy", heal=True)
        state = self._kubelet.resources[RESOURCE]
        self._timeline.step(
            "repaired",
            f"GPU {gpu} was reset and its driver rebound: Healthy again, {state.allocatable} of {state.capacity} allocatable\n"
            f"{self._status(gpu)}",
            took,
            GOOD,
        )

    async def _restart_kubelet(self) -> None:
        held = {name: self._gpus(pod.ids(RESOURCE)) for name, pod in self._kubelet.pods.items()}
        mark = len(self._kubelet.events)
        await self._kubelet.restart(orderly=False, pause=KUBELET_AWAY)
        listed = await self._until(lambda: self._event(EventKind.LIST, mark), "the daemon registers again")
        begun, register = self._event(EventKind.STARTED, mark), self._event(EventKind.REGISTER, mark)
        assert begun
        assert register
        state = self._kubelet.resources[RESOURCE]
        for name, gpus in held.items():
            again = await self._admitted(name, len(gpus))
            if self._gpus(again.ids) != gpus or not state.healthy.issuperset(again.ids):
                raise StepFailedError(f"pod {name} keeps GPUs {gpus} over the kubelet's restart: {again.ids} now")
        pods = ", ".join(f"{name} {self._name(self._kubelet.pods[name].ids(RESOURCE))}" for name in held)
        self._timeline.step(
            "kubelet",
            f"killed, and back; timed from the new kubelet.sock to the list, Register came after "
            f"{milliseconds(register.at - begun.at)}\n"
            f"{state.allocatable} of {state.capacity} Healthy; pods keep what they hold: {pods}",
            listed.at - begun.at,
        )

    async def _stop(self) -> None:
        endpoint = Path(self._kubelet.resources[RESOURCE].endpoint)
        mark = len(self._kubelet.events)
        begun = time.perf_counter()
        self._daemon.process.terminate()
        ended = await self._until(lambda: self._event(EventKind.STREAM_ENDED, mark), "SIGTERM ends the stream")
        await self._until(lambda: self._daemon.ended, "SIGTERM ends the daemon")
        took = time.perf_counter() - begun
        left = sorted(
            path.name for path in endpoint.parent.iterdir() if path.is_socket() and path.name != "kubelet.sock"
        )
        if (ended.text, self._daemon.process.returncode, left) != ("OK", 0, []):
            raise StepFailedError(
                "on SIGTERM the stream ends with OK, the process with status 0, and no socket stays: stream "
                f"{ended.text}, status {self._daemon.process.returncode}, sockets {left}"
            )
        self._timeline.step(
            "SIGTERM",
            f"the stream ended with {ended.text} after {milliseconds(ended.at - begun)}; exit status "
            f"{self._daemon.process.returncode}, socket removed",
            took,
        )

    # Helpers of steps

    async def _fault(self, gpu: int, health: str, **fault: Any) -> tuple[Event, float]:
        """Send a fault like `gpu-plugin fault`. Return the list that shows `health`, and the seconds from request to list."""
        mark = len(self._kubelet.events)
        uuid = self._profile.gpus[gpu].uuid
        requested_at = time.perf_counter()
        try:
            await asyncio.to_thread(control.request, self._state, "fault", gpu=gpu, **fault)
        except control.ControlError as error:
            raise StepFailedError(f"the daemon takes the fault {fault} of GPU {gpu}: {error}") from error
        event = await self._until(lambda: self._event(EventKind.LIST, mark), f"GPU {gpu} becomes {health} on {fault}")
        if event.changed != {uuid: health}:
            raise StepFailedError(f"{fault} makes GPU {gpu} {health} and no other: the list changed {event.changed}")
        return event, event.at - requested_at

    async def _admitted(self, name: str, count: int) -> Admission:
        try:
            async with asyncio.timeout(STEP_SECONDS):
                return await self._kubelet.admit(name, {RESOURCE: count})
        except (AdmissionError, TimeoutError) as error:
            raise StepFailedError(f"pod {name} with {count} GPUs is admitted: {error or 'no answer'}") from error

    async def _until(self, predicate: Callable[[], T | None], what: str) -> T:
        try:
            await self._kubelet.wait_for(lambda: predicate() or self._daemon.ended, STEP_SECONDS, what)
        except TimeoutError as error:
            raise StepFailedError(str(error)) from None
        found = predicate()
        if not found:
            raise StepFailedError(f"{what}: the daemon ended instead, with status {self._daemon.process.returncode}")
        return found

    def _event(self, kind: EventKind, mark: int = 0) -> Event | None:
        return next((event for event in self._kubelet.events[mark:] if event.kind is kind), None)

    def _gpus(self, ids: Iterable[str]) -> list[int]:
        return sorted(self._index[identifier] for identifier in ids)

    def _name(self, ids: Iterable[str]) -> str:
        numbers = self._gpus(ids)
        text = ", ".join(map(str, numbers))
        if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
            text = f"{numbers[0]}-{numbers[-1]}"
        return f"GPU{'s' * (len(numbers) > 1)} {text}"

    def _reason(self, given: Allocation) -> str:
        nodes = "none" if given.numa_nodes is None else f"node {', '.join(map(str, sorted(given.numa_nodes)))}"
        if given.ask is None:
            return f"NUMA hint: {nodes}, with just as many free, so the kubelet took them without asking the daemon"
        preferred = self._name(given.preferred) if given.preferred else "none"
        return f"NUMA hint: {nodes}; on offer: {self._name(given.ask.available_device_ids)}; the daemon preferred {preferred}"

    def _place(self, ids: Iterable[str]) -> str:
        gpus = self._gpus(ids)
        nodes = sorted({self._profile.gpus[gpu].numa_node for gpu in gpus})
        place = f"NUMA node {', '.join(map(str, nodes))}"
        if len(gpus) == 1:
            return place
        own = {gpu.pci_bus_id for gpu in self._profile.gpus}
        links = [{end for end in self._profile.remotes[gpu] if end} for gpu in gpus]
        if links[0] and not links[0] & own and all(ends == links[0] for ends in links):
            count = min(len([end for end in self._profile.remotes[gpu] if end]) for gpu in gpus)
            return f"{place}, {count} NVLinks each into the same NVSwitches"
        return place

    async def _log_line_about(self, gpu: int) -> str:
        """Return the daemon's first log line about why a GPU became unfit; lines about consequences follow."""
        uuid = self._profile.gpus[gpu].uuid
        line = await self._until(
            lambda: next((each for each in self._daemon.messages if uuid in each and _UNFIT in each), None),
            f"the daemon says of GPU {gpu} that it {_UNFIT}",
        )
        return self._short(line)

    def _short(self, message: str) -> str:
        for uuid, index in self._index.items():
            message = message.replace(f", {uuid})", ")").replace(uuid, str(index))
        return message

    def _status(self, gpu: int) -> str:
        uuid = self._profile.gpus[gpu].uuid
        for name in self._kubelet.pods:
            health = self._kubelet.pod_health(name)["main"][RESOURCE]
            if uuid in health:
                each = ", ".join(f"GPU {self._index[identifier]} {health[identifier]}" for identifier in health)
                return f"status of pod {name}: {each}"
        return "no pod holds it"


def milliseconds(seconds: float) -> str:
    """Format a duration for people, with about three digits."""
    value = seconds * 1000
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
