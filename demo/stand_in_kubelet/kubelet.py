"""The stand-in kubelet: the device manager of one node, in this process, with its own device plugin directory."""

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

RUNTIME_READY = 0.02
"""Seconds from the kubelet's start until its container runtime is ready; on a real node, one second or more."""


class StandInKubelet:
    """A kubelet's device manager that a device plugin cannot distinguish from a real one. It records breaches of the contract.

    It runs on the running asyncio loop. Use it as an async context manager, or call `start` and `stop`. After a panic, calls
    that await the kubelet raise KubeletPanicError until it is started again.

    Args:
        directory: the device plugin directory; created if missing. Keep the path short: a socket's path has at most 107 bytes.
        generation: "1.36" finds clients by resource name, "1.37" by socket path (see registry.py).
        numa_policy: the topology manager's policy, with scope container. The node has the NUMA nodes of the plugins' lists.
        clock: seconds; used only to measure the grace period of five minutes.
        dial_timeout: seconds for which Register tries to connect to the plugin.
        seed: seed of the order in which ids are sent and chosen, which is random in Go.
        pod_resources_socket: path of the PodResources socket; None: PodResources is not served. "beside" means
            ../pod-resources/kubelet.sock if the name of `directory` is device-plugins, else None.
        strict: if True, every list that lacks a device of a pod is a panic. If False, only the lists over which a real
            kubelet panics.

    Attributes:
        socket: path of the socket at which plugins register.
        events: all events, in order, over all restarts.
        violations: every breach of the contract by a plugin, over all restarts.
        registrations: counts of Registers by resource name, over all restarts.
        pods: the pods and their devices, by pod name; pods outlive restarts.
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
        self._generation = generation
        self._clock = clock
        self._dial_timeout = dial_timeout
        self._rng = random.Random(seed)  # noqa: S311 - an order, not a secret
        self._journal = Journal()
        self._registry = self._new_registry()
        self._admission = PodAdmission(
            self._journal, numa_policy, self._rng, lambda: self._registry, self._write_checkpoint, self._panic
        )
        self._registration = RegistrationService(self._journal, directory, self._connect)
        self._pod_resources = PodResourcesService(
            self._admission.active, lambda: self.resources, collect=self._pods_listed
        )
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
        """The cause of a panic, until the next start; "" if there was no panic."""
        return self._journal.panicked

    @property
    def resources(self) -> Mapping[str, ResourceState]:
        """The node's resources by name. Reading them first removes resources whose plugin stopped over five minutes ago."""
        if self._registry.remove_expired():
            self._write_checkpoint()
        return self._registry.tables

    @property
    def pod_resources_lists(self) -> int:
        """Number of PodResources List calls that were answered, over all restarts."""
        return self._pod_resources.lists

    async def start(
        self, *, bind_to_listen: float = 0.0, runtime_ready: float = RUNTIME_READY, sources_ready: float = 0.0
    ) -> None:
        """Start in the same order as a real kubelet.

        PodResources answers from the beginning, with no pods. Once the container runtime is ready, after `runtime_ready`
        seconds, the device manager reads its checkpoint, removes the sockets of the directory, and listens on kubelet.sock
        (pkg/kubelet/kubelet.go: ListenAndServePodResources, initializeRuntimeDependentModules). The kubelet receives its list
        of pods `sources_ready` seconds later, or at the first admission.

        Allocatable is 0 until plugins register again. The socket accepts connections `bind_to_listen` seconds after it appears.
        Raises OSError if the directory or the socket cannot be created, and RuntimeError if the kubelet already runs.
        """
        if self.running:
            raise RuntimeError("the stand-in kubelet already runs: stop it first")
        await self._wait_dropped()  # the remains of a panic
        self._journal.panicked = ""
        self._registry = self._new_registry()
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
        """Close all connections: with GOAWAY if `orderly`, else as after the kill of a process.

        The socket files stay, without a listener, and pods continue to run. Does nothing if the kubelet does not run.
        """
        was = self.running
        self._drop(orderly=orderly)
        await self._wait_dropped()
        if was:
            self._journal.note(EventKind.STOPPED, text="in order" if orderly else "killed")

    async def restart(self, *, orderly: bool = True, pause: float = 0.0, **start: float) -> None:
        """Stop, wait for `pause` seconds, and start with the arguments `start` (see `start`)."""
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
        """Admit a pod with one container that has `limits`, or with `containers`, and start it if `start`.

        If a pod of this name runs, it keeps its devices. If a pod of this name exists and does not run, it is admitted again, and
        its devices must be healthy now. Admissions are serial: a plugin that does not answer blocks all admissions, since
        Allocate has no deadline.

        Raises AdmissionError with the kubelet's text, KubeletPanicError if the kubelet panicked before or during the call, and
        RuntimeError if the kubelet does not run for another reason.
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
        """End a pod's containers but not the pod: its next `admit` checks device health and does not call Allocate."""
        self._admission.pods[pod].running = False

    def pod_health(self, pod: str) -> dict[str, dict[str, dict[str, str]]]:
        """Return a pod's allocatedResourcesStatus: container name → resource name → device id → Healthy or Unhealthy.

        Only app containers have an entry (manager.go: UpdateAllocatedResourcesStatus).
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
        """End the ListAndWatch of a resource and wait for the event STREAM_ENDED. Leave kubelet.sock unchanged.

        "close" aborts the connection, "goaway" closes it with GOAWAY, and "rst" resets only the stream and leaves the
        connection open. Raises KeyError if the resource has no stream.
        """
        mark = len(self.events)
        self._registry.drop_stream(resource, how)
        await self.wait_for(
            lambda: any(event.kind is EventKind.STREAM_ENDED for event in self.events[mark:]),
            what=f"the end of the ListAndWatch of {resource}",
        )

    def fail_next_register(self, kind: FaultKind, message: str = "", times: int = 1) -> None:
        """Make the next `times` Registers fail.

        "refuse" answers with status UNKNOWN and `message`. "hang" does not answer: the call ends at the plugin's deadline or
        when the kubelet stops. "reset" aborts the connection before an answer.
        """
        self._registration.faults.extend([Fault(kind, message)] * times)

    def delay_register(self, seconds: float, *, answer_only: bool = False) -> None:
        """Delay every later Register by `seconds`: before it is processed or, if `answer_only`, before its answer."""
        if answer_only:
            self._registration.answer_delay = seconds
        else:
            self._registration.delay = seconds

    def check(self) -> None:
        """Raise AssertionError with all violations until now, if there are any."""
        if self.violations:
            listed = "\n  ".join(self.violations)
            raise AssertionError(f"the plugin broke the kubelet's contract {len(self.violations)} times:\n  {listed}")

    def _new_registry(self) -> PluginRegistry:
        return PluginRegistry(
            self._journal,
            generation=self._generation,
            clock=self._clock,
            rng=self._rng,
            dial_timeout=self._dial_timeout,
            list_received=self._list_received,
            list_again=lambda: self._checkpoint.wants_list(self.resources),
        )

    async def _connect(self, resource: str, path: Path) -> None:
        await self._registry.connect(resource, path)

    def _list_received(self, resource: str, gone: set[str]) -> None:
        state = self._registry.tables[resource]
        allocated = self._admission.allocated(resource)
        in_flight = {identifier for name, identifier in self._admission.in_flight if name == resource}
        if breach := gone & (allocated | in_flight):
            self._journal.breach(
                resource, f"device ids {sorted(breach)} disappeared from the list while pods may hold them"
            )
        elif state.lists == 1 and (lost := allocated - state.devices.keys()):
            self._journal.breach(resource, f"pods hold device ids {sorted(lost)}, which are not listed after a restart")
        if gone - allocated - in_flight:
            self._journal.note(EventKind.RETIRED, resource, text=" ".join(sorted(gone - allocated - in_flight)))
        if cause := list_panic(state, gone, allocated, in_flight, self._policy, strict=self._strict):
            self._panic(cause)
        self._write_checkpoint()

    def _panic(self, cause: str) -> None:
        """Stop as a kubelet does after a nil dereference: close everything at once and leave the socket files."""
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

    def _pods_listed(self) -> None:
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
