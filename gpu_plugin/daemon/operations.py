"""The operators' commands about GPUs: explain their health, hold them back, release them for maintenance, resume them."""

from collections.abc import Iterable, Mapping
from itertools import chain

from msgspec.structs import replace

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.words import are
from gpu_plugin.daemon.health_watch import EVERY_GPU, HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.devices import absent
from gpu_plugin.devices.gpu_names import called, short_bus_id
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Order
from gpu_plugin.health.signals import SIGNALS, orders
from gpu_plugin.nvml.roster import ReleaseError
from gpu_plugin.runtime.control import RefusedError
from gpu_plugin.runtime.control.server import Verb
from gpu_plugin.state.recorder import Recorder


class Operations:
    """The operators' verbs of the control socket that concern GPUs. Each can be repeated.

    They work on the known GPUs, even if the driver does not work. Each raises ConfigError if a request names an unknown GPU or
    has an unknown field. An order that cannot be written to the state directory takes effect, but a restart of the daemon
    would lose it. So its reply is a RefusedError.
    """

    def __init__(self, health: HealthWatch, now: Now, recorder: Recorder) -> None:
        self._health = health
        self._now = now
        self._recorder = recorder
        self._all_released = False

    @property
    def verbs(self) -> Mapping[str, Verb]:
        """The verbs by name. `gpu` in a request is an index or a uuid."""
        return {
            "cordon": self.cordon,
            "uncordon": self.uncordon,
            "release": self.release,
            "resume": self.resume,
        }

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the node, as they were found last."""
        return self._health.gpus

    def begin(self) -> frozenset[str] | None:
        """Return the uuids of the GPUs that an earlier process had released; None for all GPUs of the node."""
        released = self._released()
        return None if self._all_released else released

    def booted(self) -> None:
        """End every release, because the node was rebooted."""
        self._all_released = False
        self._health.drop_past(EVERY_GPU)

    def gone(self) -> tuple[Gpu, ...]:
        """Return GPUs that are not listed and that orders may name: missing GPUs, and GPUs with stored records.

        `unreadable` is the reason why a GPU is missing. The index is -1: other GPUs may have the former index now.
        """
        monitor = self._now.monitor
        missing, former = ((), ()) if monitor is None else (monitor.node.absent, monitor.former)
        remembered = (gpu.uuid for gpu in former), (entry.uuid for entry in self._health.past)
        taken = {EVERY_GPU, *(gpu.uuid for gpu in (*self._health.gpus, *missing))}
        others = dict.fromkeys(uuid for uuid in chain(*remembered) if uuid not in taken)
        return (*(replace(gpu, index=-1) for gpu in missing), *(Gpu(uuid, -1) for uuid in others))

    def found(self) -> None:
        """Release newly found GPUs if all GPUs of the node are released."""
        if self._all_released:
            released = self._health.released()
            for gpu in self._health.gpus:
                if gpu.uuid not in released:
                    self._health.observe(gpu.uuid, Order("release"))

    async def cordon(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Hold a GPU back until `uncordon`, over restarts and boots. `reason` of the request is reported with the cordon."""
        gpu, reason = self._single(request, "reason"), request.get("reason", "")
        if not isinstance(reason, str):
            raise ConfigError(f"reason: {reason!r} is not text")
        already = self._is_open(gpu, orders.CORDON)
        self._health.observe(gpu.uuid, Order("cordon", reason))
        if already:
            return await self._done(f"{called(gpu)} is cordoned already.")
        lifted = f"gpu-plugin uncordon {gpu.uuid}"
        return await self._done(f"{called(gpu)} is cordoned: no new pod gets it", f", until {lifted}.")

    async def uncordon(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Lift only a cordon. With `override`, also apply the operator's statement that the GPU is fit."""
        override = request.get("override", False)
        if not isinstance(override, bool):
            raise ConfigError(f"override: {override!r} is neither true nor false")
        if (gone := self._missing(request, "override")) is not None:
            return await self._done(*(self._drop_missing(gone) if override else self._drop_cordon(gone)))
        gpu = self._single(request, "override")
        done = []
        if self._is_open(gpu, orders.CORDON):
            self._health.observe(gpu.uuid, Order("uncordon"))
            done.append("its cordon is lifted")
        before = self._open_signals(gpu)
        if override and before:
            self._health.override(gpu.uuid)
            if changed := _changed(before, after := self._open_signals(gpu)):
                done.append(f"its faults are overridden: {changed}")
            elif not done and (fatal := [words for words, verdict in after.items() if verdict is Verdict.FATAL]):
                raise RefusedError(
                    f"{called(gpu)}: nothing was overridden: {'; '.join(fatal)} cannot be overridden. What to do: "
                    f"gpu-plugin explain {gpu.index}"
                )
        if done and (monitor := self._now.monitor) is not None:
            monitor.look_now()
        text = f"{called(gpu)}: {', and '.join(done) or 'it is not cordoned, so nothing was changed'}. "
        standing = self._open_signals(gpu)
        if not standing:
            return await self._done(text + "It has no open fault or order.")
        left = "; ".join(f"{words} ({verdict.name})" for words, verdict in standing.items())
        advice = "" if override else f" To override: gpu-plugin uncordon {gpu.uuid} --override."
        return await self._done(f"{text}Still open: {left}.", advice)

    async def release(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Hold GPUs back and drop their NVML handles, so that they can be reset or the driver replaced.

        Raises RefusedError also if the handles could not be dropped yet. The GPUs are held back nevertheless.
        """
        gpus = self._ordered(request)
        for gpu in gpus:
            self._health.observe(gpu.uuid, Order("release"))
        if request.get("gpu") is None:
            self._health.release_all()
        self._released()
        try:
            if (monitor := self._now.monitor) is not None:
                await monitor.release(None if self._all_released else frozenset(gpu.uuid for gpu in gpus))
        except ReleaseError as error:
            raise RefusedError(f"{_names(gpus)}: held back for maintenance, but {error}") from None
        how = "gpu-plugin resume --all" if request.get("gpu") is None else f"gpu-plugin resume {gpus[0].uuid}"
        text = f"{_names(gpus)}: released, and held back. " + (
            "NVML is shut down: once no pod holds them, GPUs can be reset, and the driver replaced."
            if self._all_released
            else "NVML has no handle of it any more: once no pod holds it, it can be reset."
        )
        return await self._done(text, f" Once the work is done: {how}.")

    async def resume(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """End the release of GPUs. They become healthy after a good look, unless another fault or order is open."""
        gpus = self._ordered(request)
        released = self._health.released()
        for gpu in gpus:
            self._health.observe(gpu.uuid, Order("resume"))
        self._all_released = False
        self._health.drop_past(EVERY_GPU)
        if (monitor := self._now.monitor) is not None:
            await monitor.resume(None if request.get("gpu") is None else frozenset(gpu.uuid for gpu in gpus))
        resumed = [gpu for gpu in gpus if gpu.uuid in released]
        if not resumed and EVERY_GPU not in released:
            return await self._done(f"{_names(gpus)}: not released, so there was nothing to resume.")
        waiting = [gpu for gpu in resumed if self._is_open(gpu, "maintenance")]
        text = f"{_names(resumed)}: resumed." + (
            f" No good look at {_names(waiting)} yet: held back until the first good look." if waiting else ""
        )
        return await self._done(text)

    def _requested(self, request: Mapping[str, object], *more: str) -> tuple[Gpu, ...]:
        """Return the GPUs that a request names; all known GPUs if it names no GPU.

        Raises:
            ConfigError: it names an unknown GPU, or has an unknown field.
            RefusedError: it names a missing GPU, or no GPU is known yet.
        """
        if (gone := self._missing(request, *more)) is not None:
            why = gone.unreadable or "the driver does not list it"
            raise RefusedError(f"{_state_of(gone)}, so this order cannot be carried out: {why}")
        asked, gpus = request.get("gpu"), self._health.gpus
        if asked is None:
            return gpus
        if isinstance(asked, bool) or not isinstance(asked, int | str):
            raise ConfigError(f"gpu: {asked!r} is neither an index nor a uuid")
        found = tuple(gpu for gpu in gpus if asked in (gpu.index, gpu.uuid))
        if found:
            return found
        for gpu in gpus:
            if any(mig.uuid == asked for mig in gpu.mig_devices):
                raise ConfigError(f"{asked} is a MIG device of GPU {gpu.index}: name the GPU")
        if not gpus:
            raise RefusedError(
                f"GPU {asked}: no GPU of this node is known yet: the driver does not work, or finds none"
            )
        named = "has this index" if isinstance(asked, int) else "has this name"
        there = ", ".join(str(gpu.index) for gpu in gpus)
        raise ConfigError(f"GPU {asked}: no GPU of this node {named}; the indices are {there}")

    def _single(self, request: Mapping[str, object], *more: str) -> Gpu:
        """Return the GPU that a request names. Raises ConfigError if it names no GPU, or two GPUs of the same index."""
        if request.get("gpu") is None:
            raise ConfigError("gpu: missing: which GPU, by index or uuid")
        gpu, *others = self._requested(request, *more)
        if others:
            which = " and ".join(each.uuid for each in (gpu, *others))
            raise ConfigError(f"GPU {gpu.index}: {which} have this index; give the uuid")
        return gpu

    def _ordered(self, request: Mapping[str, object]) -> tuple[Gpu, ...]:
        return self._requested(request) if request.get("gpu") is None else (self._single(request),)

    def _released(self) -> frozenset[str]:
        """Return the uuids of the released GPUs, and record whether all GPUs of the node are released."""
        released, gpus = self._health.released(), {gpu.uuid for gpu in self._health.gpus}
        self._all_released = EVERY_GPU in released or (bool(gpus) and gpus <= released)
        return released

    def _missing(self, request: Mapping[str, object], *more: str) -> Gpu | None:
        """Return the GPU that a request names by its uuid or short bus id if it is not listed, else None.

        Raises ConfigError if the request has a field other than `gpu` and `more`.
        """
        if unknown := set(request) - {"gpu", *more}:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not a field of this verb")
        asked = request.get("gpu")
        names = ((gpu, (gpu.uuid, short_bus_id(gpu.pci_bus_id))) for gpu in self.gone())
        return next((gpu for gpu, called_so in names if asked and asked in called_so), None)

    def _drop_missing(self, gone: Gpu) -> tuple[str, str]:
        """Delete the stored record of a GPU that is not listed. Return the arguments of `_done`.

        Raises RefusedError if there is no record.
        """
        monitor = self._now.monitor
        dismissed = bool(gone.uuid) and monitor is not None and monitor.dismiss(gone.uuid)
        if not self._health.drop_past(gone.uuid) and not dismissed:
            raise RefusedError(f"{_state_of(gone)}: {gone.unreadable}. There is no stored record of it to delete")
        text = f"{_state_of(gone)}; its stored record is deleted."
        still = (gpu for gpu in self.gone() if gone.pci_bus_id and gpu.pci_bus_id == gone.pci_bus_id)
        return text + "".join(f" It stays missing: {gpu.unreadable}." for gpu in still), ""

    def _drop_cordon(self, gone: Gpu) -> tuple[str, str]:
        """Delete the stored cordon of a GPU that is not listed, if it has a cordon. Return the arguments of `_done`."""
        cordoned = self._health.drop_past(gone.uuid, orders.CORDON)
        text = f"{_state_of(gone)}. " + (
            "Its cordon is lifted." if cordoned else "It has no cordon, so nothing was changed."
        )
        unfit = (Verdict.FATAL, Verdict.DEGRADED)
        held = [entry for entry in self._health.past if entry.uuid == gone.uuid and entry.latch.verdict in unfit]
        if held:
            left = dict.fromkeys(f"{entry.latch.detail or entry.signal} ({entry.latch.verdict.name})" for entry in held)
            text += f" Still open: {'; '.join(left)}."
        if not gone.uuid or gone.uuid not in {gpu.uuid for gpu in self.gone()}:
            return text, ""
        return text, f" To delete its stored record: gpu-plugin uncordon {gone.uuid} --override."

    def _is_open(self, gpu: Gpu, signal: str) -> bool:
        return any(key.signal == signal for key, _, _ in self._health.ledger.standing(gpu.uuid))

    def _open_signals(self, gpu: Gpu) -> dict[str, Verdict]:
        """Return the open faults and orders of a GPU and its MIG devices, as text with the verdict, the worst first."""
        found: dict[str, Verdict] = {}
        standing = [
            entry
            for entry in self._health.ledger.standing(gpu.uuid, None)
            if not SIGNALS[entry[0].signal].of_process  # only a good look ends it
        ]
        for key, latch, verdict in sorted(standing, key=lambda entry: (-entry[2], entry[1].since)):
            where = f" (MIG device {key.device})" if key.device else ""
            found.setdefault(f"{latch.detail or key.signal}{where}", verdict)
        return found

    async def _done(self, outcome: str, advice: str = "") -> Mapping[str, object]:
        """Return the reply to an order: `done` for the operator, and `outcome` (without advice) for the event log.

        Raises RefusedError if the order could not be written, so that it would not outlive the process.
        """
        if await self._recorder.written():
            return {"done": outcome + advice, "outcome": outcome}
        raise RefusedError(
            f"{outcome.removesuffix('.')}. But this could not be written, so a restart of the daemon loses it: "
            "make sure that the state directory has free space, then give the order again"
        )


def _state_of(gone: Gpu) -> str:
    return f"{absent.named(gone)} is {'missing' if gone.unreadable else 'not known on this node'}"


def _names(gpus: Iterable[Gpu]) -> str:
    named = tuple(gpus)
    if len(named) > 2:
        return f"{len(named)} GPUs ({', '.join(str(gpu.index) for gpu in named)})"
    return " and ".join(map(called, named)) or "All GPUs (no GPU is known yet)"


def _changed(before: Mapping[str, Verdict], after: Mapping[str, Verdict]) -> str:
    """Return the changes of an override as text; empty if it changed nothing."""
    cleared = [words for words in before if words not in after]
    lowered = [words for words, verdict in before.items() if after.get(words, verdict) is not verdict]
    parts = [f"{'; '.join(cleared)} {are(len(cleared))} cleared"] if cleared else []
    parts += [f"{'; '.join(lowered)} {are(len(lowered))} no more than DEGRADED"] if lowered else []
    return ", ".join(parts)
