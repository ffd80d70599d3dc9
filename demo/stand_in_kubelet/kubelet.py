"""The stand-in kubelet: one node's device manager in this process, with a directory of its own."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from demo.stand_in_kubelet.admission import AdmissionError, PodAdmission
from demo.stand_in_kubelet.checkpoint import CheckpointKeeper, clean, read_checkpoint
from demo.stand_in_kubelet.client import DropKind
from demo.stand_in_kubelet.device_table import KubeletPanicError, ResourceState, list_panic
from demo.stand_in_kubelet.journal import EventKind, Journal
from demo.stand_in_kubelet.pod_resources import PodResourcesService, default_socket
from demo.stand_in_kubelet.pods import Admission, Container
from demo.stand_in_kubelet.registration import Fault, FaultKind, RegistrationService
from demo.stand_in_kubelet.registry import DIAL_SECONDS, Generation, PluginRegistry
from demo.stand_in_kubelet.server import SocketServer
from demo.stand_in_kubelet.topology import NumaPolicy

SOCKET = "kubelet.sock"
DIRECTORY_MODE = 0o750

# Seconds from the kubelet's start until its container runtime is ready. A real node takes one second or more.
RUNTIME_READY = 0.02


class StandInKubelet:
    """A kubelet's device manager, as far as a device plugin can notice, and strict about its contract.

    It runs on the running asyncio loop. Use it as an async context manager, or call `start` and `stop`. When it panics, all
    waiting callers get a KubeletPanicError, until it is started again.

    Args:
        directory: the device plugin directory; made if missing. Keep it short: a socket's path may have 107 bytes.
        generation: "1.36" finds clients by resource name, "1.37" by socket path (see registry.py).
        numa_policy: the topology manager's policy, scope container; NUMA nodes are those of the lists.
        clock: seconds; only for the grace period of five minutes.
        dial_timeout: seconds for which Register tries to connect to the plugin.
        seed: of the order in which ids are sent and chosen, which is random in Go.
        pod_resources_socket: the socket for PodResources; None: no socket. "beside" is ../pod-resources/kubelet.sock if
            `directory` is called device-plugins, else no socket.
        strict: panic at each list that lacks an id held by a pod, not only where a real kubelet panics.

    Attributes:
        socket: the socket at which plugins register.
        events: all events, in order, over all restarts.
        violations: all breaches of the contract by plugins, over all restarts.
        registrations: counts of Registers by resource name, over all restarts.
        pods: pods with their devices, by pod name; pods survive restarts.
        wait_for, wake: see Journal.
        release: see PodAdmission.
    """

    def __init__(
        self,
        directory: Path,
        *,
        generation: Generation = "1.36",
        numa_policy: NumaPolicy = "none",
        clock: Callable[[], float] = time.monotonic,
        dial_timeout: float = DIAL_SECONDS,
        seed: int = 0,
        pod_resources_socket: Path | Literal["beside"] | None = "beside",
        strict: bool = True,
    ) -> None:
        self.directory = directory
        self.socket = directory / SOCKET
        self.pod_resources_socket = (
            default_socket(directory) if pod_resources_socket == "beside" else pod_resources_socket
        )
        self.running = False
        self._policy = numa_policy
        rng = random.Random(seed)  # noqa: S311 - an order, not a secret
        self._journal = Journal()
        self._registry = PluginRegistry(
            self._journal,
            generation=generation,
            clock=clock,
            rng=rng,
            dial_timeout=dial_timeout,
            list_received=self._list_received,
            list_again=self._wants_list,
        )
        self._admission = PodAdmission(
            self._journal, numa_policy, rng, self._registry, self._write_checkpoint, self._panic
        )
        self._registration = RegistrationService(self._journal, directory, self._registry)
        self._pod_resources = PodResourcesService(self._admission.active, lambda: self.resources, collect=self._collect)
        self._checkpoint = CheckpointKeeper(directory, self._journal, self._admission, self._pod_resources)
        self.events, self.violations = self._journal.events, self._journal.violations
        self.wait_for, self.wake, self.release = self._journal.wait_for, self._journal.wake, self._admission.release
        self.registrations, self.pods = self._registration.counts, self._admission.pods
        self._servers: list[SocketServer] = []
        self._sources: asyncio.TimerHandle | None = None
        self._strict = strict
        self._panics: list[str] = []

    @property
    def panicked(self) -> str:
        """The cause of a panic, until the next start; "" without a panic."""
        return self._journal.panicked

    @property
    def resources(self) -> Mapping[str, ResourceState]:
        """The resources of the node by name. Reading it removes resources without a plugin after the grace period."""
        if self._registry.remove_expired():
            self._write_checkpoint()
        return self._registry.tables

    @property
    def pod_resources_lists(self) -> int:
        """Number of answered PodResources List calls, over all restarts."""
        return self._pod_resources.lists

    async def start(
        self, *, bind_to_listen: float = 0.0, runtime_ready: float = RUNTIME_READY, sources_ready: float = 0.0
    ) -> None:
        """Start in the kubelet's order.

        PodResources answers from the beginning, without pods. Once the container runtime is ready, after `runtime_ready`
        seconds, the device manager reads its checkpoint, removes sockets from the directory, and listens on kubelet.sock
        (pkg/kubelet/kubelet.go: ListenAndServePodResources, initializeRuntimeDependentModules). It gets the list of pods
        `sources_ready` seconds later, or when it must admit a pod.

        Allocatable is 0 until plugins register again. `bind_to_listen` seconds pass between the creation of the socket and the
        first accepted connection. Raises OSError if the directory or the socket cannot be made, and RuntimeError if it is
        running.
        """
        if self.running:
            raise RuntimeError("the stand-in kubelet runs already: stop it first")
        await self._wait_dropped()  # tasks left by a panic
        self._journal.panicked = ""
        self._registry.restart()
        self._admission.restart([])
        try:
            await self._serve_pod_resources()
            await asyncio.sleep(runtime_ready)
            self.directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            entries, resources = read_checkpoint(self.directory)
            self._admission.restart(entries)
            self._checkpoint.note()
            for resource in resources:
                self._registry.add_stopped(resource)
            self._admission.recount()
            clean(self.directory)
            self.running = True
            await self._serve(self._registration, self.socket, bind_to_listen=bind_to_listen)
        except BaseException:
            self._drop(orderly=False)
            await self._wait_dropped()
            raise
        if sources_ready:
            self._sources = asyncio.get_running_loop().call_later(sources_ready, self._mark_sources_ready)
        else:
            self._mark_sources_ready()
        self._journal.note(EventKind.STARTED)

    async def stop(self, *, orderly: bool = True) -> None:
        """End all connections, with GOAWAY if `orderly`, else like a killed process.

        The sockets stay without a listener; pods keep running. Nothing happens if it is not running.
        """
        was = self.running
        self._drop(orderly=orderly)
        await self._wait_dropped()
        if was:
            self._journal.note(EventKind.STOPPED, text="in order" if orderly else "killed")

    async def restart(self, *, orderly: bool = True, pause: float = 0.0, **start: float) -> None:
        """Stop, wait `pause` seconds, and start; `start` gets the other arguments."""
        await self.stop(orderly=orderly)
        if pause:
            await asyncio.sleep(pause)
        await self.start(**start)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def admit(
        self,
        pod: str,
        limits: Mapping[str, int] | None = None,
        *,
        containers: Sequence[Container] = (),
        start: bool = True,
    ) -> Admission:
        """Admit a pod with one container with `limits`, or with `containers`, and start it unless `start` is False.

        A running pod of that name keeps its devices; a pod that is not running is admitted again with the present health.
        Admissions are serial. A plugin that does not answer blocks them, since Allocate has no deadline.

        Raises AdmissionError with the kubelet's text, KubeletPanicError if the kubelet panicked before or in between, and
        RuntimeError if it is not running for another reason.
        """
        if self.panicked:
            raise KubeletPanicError(self.panicked)
        if not self.running:
            raise RuntimeError(f"the stand-in kubelet does not run, so pod {pod} cannot be admitted: start it first")
        panics = len(self._panics)
        try:
            return await self._admission.admit(pod, containers or (Container("main", limits or {}),), start=start)
        except AdmissionError as error:
            if len(self._panics) == panics:
                raise
            raise KubeletPanicError(self._panics[-1]) from error

    def exit_containers(self, pod: str) -> None:
        """End a pod's containers while the pod stays: its next `admit` checks health and calls no Allocate."""
        self._admission.pods[pod].running = False

    def pod_health(self, pod: str) -> dict[str, dict[str, dict[str, str]]]:
        """Return a pod's allocatedResourcesStatus: container name → resource name → device id → Healthy or Unhealthy.

        Init containers other than sidecars have no status (manager.go: UpdateAllocatedResourcesStatus).
        """
        record = self._admission.pods[pod]
        regular = {container.name for container in record.containers if container.kind == "app"}
        return {
            container: {
                resource: {identifier: state.health_of(identifier) for identifier in allocation.ids}
                for resource, allocation in allocated.items()
                for state in (self._registry.tables.get(resource) or ResourceState(resource),)
            }
            for container, allocated in record.allocated.items()
            if container in regular
        }

    async def drop_stream(self, resource: str, how: DropKind = "goaway") -> None:
        """End the ListAndWatch of a resource; kubelet.sock stays. Return when the kubelet has noticed it.

        "close" cuts the connection, "goaway" closes it in order, "rst" resets only the stream and leaves the connection
        open. Raises KeyError if the resource has no stream.
        """
        mark = len(self.events)
        self._registry.drop_stream(resource, how)
        await self.wait_for(
            lambda: any(event.kind is EventKind.STREAM_ENDED for event in self.events[mark:]),
            what=f"the end of the ListAndWatch of {resource}",
        )

    def fail_next_register(self, kind: FaultKind, message: str = "", times: int = 1) -> None:
        """Make the next `times` Registers fail.

        "refuse" answers with status UNKNOWN and `message`; "hang" does not answer, until the plugin's deadline or the end of
        the kubelet; "reset" cuts the connection before an answer.
        """
        self._registration.faults.extend([Fault(kind, message)] * times)

    def delay_register(self, seconds: float, *, answer_only: bool = False) -> None:
        """From now on delay each Register by this many seconds before it is processed or, if `answer_only`, answered."""
        if answer_only:
            self._registration.late = seconds
        else:
            self._registration.delay = seconds

    def check(self) -> None:
        """Raise AssertionError with all violations so far."""
        if self.violations:
            listed = "\n  ".join(self.violations)
            raise AssertionError(f"the plugin broke the kubelet's contract {len(self.violations)} times:\n  {listed}")

    def _wants_list(self) -> bool:
        return self._checkpoint.wants_list(self.resources)

    def _list_received(self, resource: str, gone: set[str]) -> None:
        state = self._registry.tables[resource]
        allocated = self._admission.allocated(resource)
        in_flight = {identifier for name, identifier in self._admission.in_flight if name == resource}
        if breach := gone & (allocated | in_flight):
            self._journal.breach(
                resource, f"device ids {sorted(breach)} vanished from the list while pods may hold them"
            )
        elif state.lists == 1 and (lost := allocated - state.devices.keys()):
            self._journal.breach(resource, f"device ids {sorted(lost)}, held by pods, are not listed after a restart")
        if gone - allocated - in_flight:
            self._journal.note(EventKind.RETIRED, resource, text=" ".join(sorted(gone - allocated - in_flight)))
        if cause := list_panic(state, gone, allocated, in_flight, self._policy, strict=self._strict):
            self._panic(cause)
        self._write_checkpoint()

    def _panic(self, cause: str) -> None:
        """Simulate a nil dereference in a kubelet: all connections end at once, and sockets remain without a listener."""
        self._journal.panicked = cause
        self._panics.append(cause)
        self._drop(orderly=False)
        self._journal.note(EventKind.PANICKED, text=cause)

    async def _serve(self, service: Any, path: Path, *, bind_to_listen: float = 0.0) -> None:
        server = SocketServer([service])
        self._servers.append(server)
        await server.listen(path, bind_to_listen=bind_to_listen)

    async def _serve_pod_resources(self) -> None:
        path = self.pod_resources_socket
        if path is not None:
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            await self._serve(self._pod_resources, path)

    def _collect(self) -> None:
        self._admission.collect()
        self.wake()

    def _mark_sources_ready(self) -> None:
        self._admission.sources_ready = True
        self.wake()

    def _drop(self, *, orderly: bool) -> None:
        self.running = False
        if self._sources is not None:
            self._sources.cancel()
        for server in self._servers:
            server.drop(orderly=orderly)
        self._registry.drop(orderly=orderly)

    async def _wait_dropped(self) -> None:
        await self._registry.wait_dropped()
        while self._servers:
            await self._servers.pop().wait_dropped()

    def _write_checkpoint(self) -> None:
        if self.running:
            self._checkpoint.write(self._registry.tables)
