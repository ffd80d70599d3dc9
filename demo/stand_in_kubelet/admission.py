"""Admits pods: NUMA hint, GetPreferredAllocation, Allocate, PreStartContainer, one pod after another.

Sources: pkg/kubelet/cm/devicemanager/manager.go (Allocate, allocateContainerResources, devicesToAllocate,
GetDeviceRunContainerOptions), topologymanager (scope container), lifecycle/predicate.go.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from demo.stand_in_kubelet import topology
from demo.stand_in_kubelet.client import CallError
from demo.stand_in_kubelet.device_table import KubeletPanicError, ResourceState, admission_panic
from demo.stand_in_kubelet.journal import EventKind, Journal
from demo.stand_in_kubelet.pods import Admission, Allocation, Container, Entry, Pod, conflicts, edits, response_breaches
from demo.stand_in_kubelet.registry import Endpoint, PluginRegistry
from demo.stand_in_kubelet.selection import SelectionError, check_serving, complete, preferred_breaches, select
from demo.stand_in_kubelet.topology import Hint, NumaPolicy
from gpu_plugin.containers.edits import ContainerEdits
from gpu_plugin.kubelet import messages, wire

PRE_START_SECONDS = 30.0
UNEXPECTED = "UnexpectedAdmissionError"
TOPOLOGY = "TopologyAffinityError"


class AdmissionError(Exception):
    """A pod was not admitted or not started. The text is the kubelet's message, and `reason` is as in pod.status.reason."""

    def __init__(self, message: str, reason: str = UNEXPECTED) -> None:
        self.reason = reason
        super().__init__(message)


class PodAdmission:
    """The pods of one kubelet and the allocation of their devices.

    The pods on the node can differ from the pods that the device manager has. It learns of pods from its own admissions and, at
    its start, from its checkpoint, and it counts the devices of an ended pod until `collect`.

    Attributes:
        pods: running pods by name; they survive restarts of the kubelet.
        known: by uid, the pods whose devices the device manager counts.
        in_flight: device ids of each resource with an Allocate under way.
        sources_ready: whether the kubelet has got the list of its pods since its start.
    """

    def __init__(
        self,
        journal: Journal,
        policy: NumaPolicy,
        rng: random.Random,
        registry: PluginRegistry,
        checkpoint: Callable[[], None],
        panic: Callable[[str], None],
    ) -> None:
        self.pods: dict[str, Pod] = {}
        self.known: dict[str, Pod] = {}
        self.sources_ready = True
        self.in_flight: Counter[tuple[str, str]] = Counter()
        self._journal = journal
        self._policy = policy
        self._rng = rng
        self._registry = registry
        self._checkpoint = checkpoint
        self._panic = panic
        self._serial = asyncio.Lock()

    async def admit(self, name: str, containers: Sequence[Container], *, start: bool) -> Admission:
        """Admit a pod, or admit a known pod again, and start its containers if `start`.

        Raises AdmissionError; then the pod holds nothing and is not known any more.
        """
        begun = time.perf_counter()
        self.sources_ready = True
        pod = self.pods.setdefault(name, Pod(name, tuple(containers)))
        pod.containers = tuple(containers)
        try:
            async with self._serial:
                if not pod.running:  # a running pod has its devices already, so the plugin is not called
                    await self._allocate_pod(pod)
            if start:
                await self._start(pod)
        except AdmissionError as error:
            self._journal.note(EventKind.REJECTED, text=f"{name}: {error}")
            self.pods.pop(name, None)
            raise
        except KubeletPanicError:  # the pod and its devices survive this kubelet
            raise
        except BaseException:
            self.pods.pop(name, None)
            raise
        done = tuple(each for by_resource in pod.allocated.values() for each in by_resource.values())
        self._journal.note(EventKind.ADMITTED, text=name)
        return Admission(name, done, time.perf_counter() - begun)

    def release(self, name: str) -> None:
        """End a pod: PodResources no longer reports it, and no plugin is notified. Raises KeyError for an unknown pod.

        Its devices still count, and stay in the checkpoint, until the kubelet collects them and writes it again: at an
        admission that requests devices, or when PodResources was called and a list came.
        """
        del self.pods[name]
        self._journal.note(EventKind.RELEASED, text=name)

    def allocated(self, resource: str) -> set[str]:
        """Return all device ids of a resource that pods hold which have not ended."""
        return {identifier for pod in self.pods.values() for identifier in pod.ids(resource)}

    def active(self) -> dict[str, Pod]:
        """Return the pods that the kubelet knows, by name: none before `sources_ready`; uncounted devices are left out."""
        if not self.sources_ready:
            return {}
        return {
            name: pod if pod.uid in self.known else Pod(name, pod.containers, uid=pod.uid)
            for name, pod in self.pods.items()
        }

    def collect(self) -> None:
        """Drop devices of ended pods, if the pods are known (manager.go: UpdateAllocatedDevices)."""
        active = {pod.uid for pod in self.pods.values()}
        if self.sources_ready and self.known.keys() - active:
            self.known = {uid: pod for uid, pod in self.known.items() if uid in active}
            self.recount()

    def recount(self) -> None:
        """Count exactly the devices of known pods as allocated."""
        for resource, state in self._registry.tables.items():
            state.allocated = {identifier for pod in self.known.values() for identifier in pod.ids(resource)}

    def entries(self) -> list[Entry]:
        """Return the entries of the checkpoint."""
        return [
            Entry(uid, container, resource, each.by_numa, each.encoded)
            for uid, pod in self.known.items()
            for container, allocated in pod.allocated.items()
            for resource, each in allocated.items()
        ]

    def restart(self, entries: Sequence[Entry]) -> None:
        """Start with the entries of a checkpoint."""
        self.sources_ready = False
        running = {pod.uid: pod for pod in self.pods.values()}
        self.known = {}
        for entry in entries:
            pod = running.get(entry.uid) or self.known.get(entry.uid) or Pod(entry.uid, (), uid=entry.uid)
            self.known[entry.uid] = pod
            if entry.uid not in running:  # the pod has ended, and the file was not written since
                ids = tuple(dict.fromkeys(identifier for some in entry.ids.values() for identifier in some))
                numa = {identifier: (node,) for node, some in entry.ids.items() for identifier in some if node >= 0}
                ended = Allocation(
                    entry.container, entry.resource, ids, None, None, (), ContainerEdits(), entry.answer, numa
                )
                pod.allocated.setdefault(entry.container, {})[entry.resource] = ended

    async def _allocate_pod(self, pod: Pod) -> None:
        reusable: dict[str, set[str]] = {}
        order = [c for c in pod.containers if c.kind != "app"] + [c for c in pod.containers if c.kind == "app"]
        for container in order:
            await self._allocate_container(pod, container, reusable)
            for resource, allocation in pod.allocated.get(container.name, {}).items():
                if container.kind == "init":
                    reusable.setdefault(resource, set()).update(allocation.ids)
                else:
                    reusable.get(resource, set()).difference_update(allocation.ids)

    async def _allocate_container(self, pod: Pod, container: Container, reusable: dict[str, set[str]]) -> None:
        limits = {resource: count for resource, count in container.limits.items() if count}
        if limits:
            self.collect()
        for resource, count in limits.items():
            if resource not in self._registry.tables:
                # The device manager would admit it without devices; the scheduler's predicate comes first.
                raise AdmissionError(
                    f"Node didn't have enough resource: {resource}, requested: {count}, used: 0, capacity: 0",
                    f"OutOf{resource}",
                )
        hint = self._hint(pod, container, limits, reusable)
        wanted = list(limits.items())
        self._rng.shuffle(wanted)  # the order of a Go map is random
        before = dict(pod.allocated.get(container.name, {}))
        for resource, count in wanted:
            try:
                await self._allocate(pod, container, resource, count, reusable.get(resource, set()), hint)
            except (SelectionError, CallError) as error:
                raise AdmissionError(f"Allocate failed due to {error}, which is unexpected") from error
        if pod.allocated.get(container.name, {}) != before:
            self._checkpoint()
        answers = [each.response for each in pod.allocated.get(container.name, {}).values()]
        for conflict in conflicts(answers):
            self._journal.breach("", conflict)

    def _hint(self, pod: Pod, container: Container, limits: dict[str, int], reusable: dict[str, set[str]]) -> Hint:
        if self._policy == "none":
            return Hint(None, preferred=True)
        tables = self._registry.tables
        hints = []
        for resource, count in limits.items():
            state, again = tables[resource], pod.allocated.get(container.name, {}).get(resource)
            if again and (cause := admission_panic(state, again.ids)):
                self._journal.breach(resource, cause)
                self._panic(cause)
                raise KubeletPanicError(cause)
            free = set(again.ids) if again else state.free
            known = state.devices.keys() & free if state.numa else free
            left = state.devices.keys() & reusable.get(resource, set())
            hints.append(topology.resource_hints(state.numa, known, left, count))
        nodes = {n for state in tables.values() for numa in state.numa.values() for n in numa if n >= 0}
        hint, admitted = topology.merge(self._policy, hints, nodes)
        if not admitted:
            raise AdmissionError("Resources cannot be allocated with Topology locality", TOPOLOGY)
        return hint

    async def _allocate(
        self, pod: Pod, container: Container, resource: str, count: int, reusable: set[str], hint: Hint
    ) -> None:
        state = self._registry.tables[resource]
        allocated = pod.allocated.get(container.name, {}).get(resource) if pod.uid in self.known else None
        if allocated is not None and len(allocated.ids) != count:
            raise SelectionError(
                f'pod "{pod.name}" container "{container.name}" changed request for resource "{resource}" '
                f"from {len(allocated.ids)} to {count}"
            )
        check_serving(state, allocated.ids if allocated else ())
        if allocated is not None:
            return
        selection = select(state, count, reusable, hint, self._rng)
        state.allocated.update(selection.taken)
        endpoint = self._registry.endpoints.get(resource)
        preferred: tuple[str, ...] = ()
        ask = selection.ask if endpoint is not None and endpoint.preferred_available else None
        if ask is not None and endpoint is not None:
            preferred = await self._ask_preferred(state, endpoint, ask)
        ids = complete(selection, preferred, self._rng)
        state.allocated.update(ids)
        if endpoint is None:
            self.recount()
            raise SelectionError(f"unknown Device Plugin {resource}")
        answer = await self._call_allocate(state, endpoint, ids)
        responses = messages.decode(messages.AllocateResponse, answer).container_responses
        if len(responses) != 1:
            self._journal.breach(resource, f"Allocate of 1 container answered with {len(responses)} responses")
        if not responses:
            raise SelectionError(
                "no containers return in allocation response "
            )  # its ids stay allocated, as in the kubelet
        response = edits(responses[0])
        for breach in response_breaches(response):
            self._journal.breach(resource, breach)
        numa = {each: state.devices[each].numa for each in ids if each in state.devices}
        pod.allocated.setdefault(container.name, {})[resource] = Allocation(
            container.name, resource, ids, hint.nodes, ask, preferred, response, bytes(responses[0]), numa
        )
        self.known[pod.uid] = pod

    async def _ask_preferred(
        self, state: ResourceState, endpoint: Endpoint, ask: messages.ContainerPreferredAllocationRequest
    ) -> tuple[str, ...]:
        request = bytes(messages.PreferredAllocationRequest([ask]))
        state.requested = set(ask.available_device_ids)
        try:
            data = await self._call(state, endpoint, wire.PREFERRED, request)
        except CallError as error:
            self._journal.breach(state.resource, f"GetPreferredAllocation failed, which fails the pod: {error}")
            raise SelectionError(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from error
        responses = messages.decode(messages.PreferredAllocationResponse, data).container_responses
        answer = tuple(responses[0].device_ids) if responses else ()
        for breach in preferred_breaches(ask, answer):
            self._journal.breach(state.resource, breach)
        return answer

    async def _call_allocate(self, state: ResourceState, endpoint: Endpoint, ids: tuple[str, ...]) -> bytes:
        request = messages.AllocateRequest([messages.ContainerAllocateRequest(list(ids))])
        keys = [(state.resource, identifier) for identifier in ids]
        self.in_flight.update(keys)
        state.requested = set(ids)
        try:
            return await self._call(state, endpoint, wire.ALLOCATE, bytes(request))
        except BaseException:
            self.recount()
            raise
        finally:
            self.in_flight.subtract(keys)
            self.in_flight += Counter()  # removes zeros

    async def _call(
        self, state: ResourceState, endpoint: Endpoint, method: str, request: bytes, timeout: float | None = None
    ) -> bytes:
        if state.stopped_at is not None:
            raise SelectionError(f"endpoint {endpoint.client.path} has been stopped")
        return await endpoint.client.call(method, request, timeout=timeout)

    async def _start(self, pod: Pod) -> None:
        for allocated in pod.allocated.values():
            for resource, allocation in allocated.items():
                endpoint = self._registry.endpoints.get(resource)
                if pod.running or endpoint is None or not endpoint.pre_start_required:
                    continue
                request = bytes(messages.PreStartContainerRequest(list(allocation.ids)))
                state = self._registry.tables[resource]
                try:
                    await self._call(state, endpoint, wire.PRE_START, request, PRE_START_SECONDS)
                except (CallError, SelectionError) as error:
                    if isinstance(error, CallError) and error.code == "DeadlineExceeded":
                        self._journal.breach(resource, f"PreStartContainer took over {PRE_START_SECONDS:g} s")
                    message = f"device plugin PreStartContainer rpc failed with err: {error}"
                    raise AdmissionError(message, "CreateContainerError") from error
        pod.running = True
