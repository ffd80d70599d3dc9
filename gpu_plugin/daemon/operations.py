"""What operators ask of the running daemon about its GPUs: why they are as they are, held back, or let go of for a while."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

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
    """The verbs of the control socket that operators have besides `status`. All of them may be asked for again and again.

    They work whether or not the driver does, on the GPUs that are known then. Each raises ConfigError where a request names a GPU
    that is not there, or a field that it does not have. An order that could not be written down is obeyed all the same, and
    refused with RefusedError: a restart of the daemon would forget it.
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
            "explain": self.explain,
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
        """The uuids of GPUs that an earlier process had released, as the monitor takes them: None for all of the node."""
        released = self._released()
        return None if self._all_released else released

    def booted(self) -> None:
        """A new boot ends every release."""
        self._all_released = False
        self._health.drop_past(EVERY_GPU)

    def gone(self) -> tuple[Gpu, ...]:
        """GPUs that are not listed and that orders may name: missing GPUs, and others that are remembered.

        `unreadable` is the reason why a GPU is missing. The index is -1: other GPUs may have the former index now.
        """
        monitor = self._now.monitor
        missing, former = ((), ()) if monitor is None else (monitor.node.absent, monitor.former)
        remembered = (gpu.uuid for gpu in former), (entry.uuid for entry in self._health.past)
        taken = {EVERY_GPU, *(gpu.uuid for gpu in (*self._health.gpus, *missing))}
        others = dict.fromkeys(uuid for uuid in chain(*remembered) if uuid not in taken)
        return (*(replace(gpu, index=-1) for gpu in missing), *(Gpu(uuid, -1) for uuid in others))

    def found(self) -> None:
        """GPUs that were found while all of the node is released are released as well."""
        if self._all_released:
            released = self._health.released()
            for gpu in self._health.gpus:
                if gpu.uuid not in released:
                    self._health.observe(gpu.uuid, Order("release"))

    async def explain(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Why the GPUs that are asked for are in their state, since when, and what would change it.

        What is told outlives a kill of this process, where it can be written down at all.
        """
        await self._recorder.written()
        if (gone := self._missing(request)) is not None:
            from gpu_plugin.health.explain import missing  # noqa: PLC0415 - as below

            return {"gpus": [missing(gone)]}
        return self.explained(self._requested(request))

    def explained(self, gpus: Sequence[Gpu] | None = None) -> Mapping[str, Any]:
        """What `health.explain` says of these GPUs, None: of all."""
        from gpu_plugin.health.explain import explain  # noqa: PLC0415 - 1 ms of the start that no pod need wait for

        return explain(self._health.ledger, self._health.gpus if gpus is None else gpus, self._health.now())

    async def cordon(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Holds a GPU back until `uncordon`, over restarts and boots. `reason` of the request is told wherever it stands."""
        gpu, reason = self._single(request, "reason"), request.get("reason", "")
        if not isinstance(reason, str):
            raise ConfigError(f"reason: {reason!r} is not text")
        already = self._is_open(gpu, orders.CORDON)
        self._health.observe(gpu.uuid, Order("cordon", reason))
        if already:
            return await self._done(f"{called(gpu)} is cordoned already.")
        lifted = f"gpu-plugin uncordon --gpu {gpu.uuid}"
        return await self._done(f"{called(gpu)} is cordoned: no new pod gets it", f", until {lifted}.")

    async def uncordon(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Lifts a cordon, and nothing else; with `override` also takes the operator's word that the GPU is fit."""
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
        before = self._open_faults(gpu)
        if override and before:
            self._health.override(gpu.uuid)
            if changed := _changed(before, after := self._open_faults(gpu)):
                done.append(f"what was held against it is overridden: {changed}")
            elif not done and (fatal := [words for words, verdict in after.items() if verdict is Verdict.FATAL]):
                raise RefusedError(
                    f"{called(gpu)}: nothing was overridden: {'; '.join(fatal)} cannot be. What to do: "
                    f"gpu-plugin explain --gpu {gpu.index}"
                )
        if done and (monitor := self._now.monitor) is not None:
            monitor.look_now()
        text = f"{called(gpu)}: {', and '.join(done) or 'it is not cordoned, so nothing was changed'}. "
        standing = self._open_faults(gpu)
        if not standing:
            return await self._done(text + "Nothing is held against it.")
        stands = "; ".join(f"{words} ({verdict.name})" for words, verdict in standing.items())
        advice = "" if override else f" To override: gpu-plugin uncordon --gpu {gpu.uuid} --override."
        return await self._done(f"{text}Still held against it: {stands}.", advice)

    async def release(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Holds GPUs back and drops their NVML handles, so that they can be reset or the driver replaced.

        Raises RefusedError also where the handles could not be dropped yet; the GPUs are held back all the same.
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
        how = "gpu-plugin resume" if request.get("gpu") is None else f"gpu-plugin resume --gpu {gpus[0].uuid}"
        text = f"{_names(gpus)}: released, and held back. " + (
            "NVML is shut down: GPUs can be reset, and the driver replaced."
            if self._all_released
            else "NVML has no handle of it any more: it can be reset."
        )
        return await self._done(text, f" Once the work is done: {how}.")

    async def resume(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Takes GPUs back that were released. They are healthy after a good look, unless something else is against them."""
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
            f" No good look at {_names(waiting)} yet: held back until there is one." if waiting else ""
        )
        return await self._done(text)

    def health(self) -> Mapping[str, object]:
        """The health of every GPU, what happened to it since the start, and which signals it supports.

        `gpus` has `index`, `uuid`, `state` (healthy, degraded or unhealthy; a GPU of which only a MIG device is unfit is
        degraded), `verdict`, `reasons` and `measures` (the `readings` that `explain` tells) of each; `supported` is whether a GPU
        tells what a signal needs, by uuid and name; `xid_classes` is the recovery class of each Xid of the policy's table.
        """
        told = self.explained()
        explained = cast("list[Mapping[str, Any]]", told["gpus"])
        monitor = self._now.monitor
        unsupported = monitor.unsupported() if monitor is not None else {}
        return {
            "gpus": [_state(gpu) for gpu in explained],
            "supported": {
                uuid: {name: not signal.asks or not fields.issuperset(signal.asks) for name, signal in SIGNALS.items()}
                for uuid, fields in unsupported.items()
            },
            "xid_classes": {xid: row.recovery for xid, row in self._health.ledger.policy.xids.table.items()},
            **self._health.reports.status(),
        }

    def _requested(self, request: Mapping[str, object], *more: str) -> tuple[Gpu, ...]:
        """The GPUs that a request names, all of them where it names none.

        Raises:
            ConfigError: it names one that is not there.
            RefusedError: it names one, and none is known yet.
        """
        if (gone := self._missing(request, *more)) is not None:
            why = gone.unreadable or "it is not among those that the driver lists"
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
        raise ConfigError(f"GPU {asked}: no GPU of this node {named}; there are those of index {there}")

    def _single(self, request: Mapping[str, object], *more: str) -> Gpu:
        """The one GPU that a request names. Raises ConfigError where it names none, or two of the same index."""
        if request.get("gpu") is None:
            raise ConfigError("gpu: missing: which GPU, by index or uuid")
        gpu, *others = self._requested(request, *more)
        if others:
            which = " and ".join(each.uuid for each in (gpu, *others))
            raise ConfigError(f"GPU {gpu.index}: {which} go by this index; give its uuid")
        return gpu

    def _ordered(self, request: Mapping[str, object]) -> tuple[Gpu, ...]:
        return self._requested(request) if request.get("gpu") is None else (self._single(request),)

    def _released(self) -> frozenset[str]:
        """The uuids of the GPUs that are released; notes whether those are all of the node."""
        released, gpus = self._health.released(), {gpu.uuid for gpu in self._health.gpus}
        self._all_released = EVERY_GPU in released or (bool(gpus) and gpus <= released)
        return released

    def _missing(self, request: Mapping[str, object], *more: str) -> Gpu | None:
        """The GPU that a request names by its uuid or short bus id and that is not listed.

        Raises ConfigError if the request has a field other than `gpu` and `more`.
        """
        if unknown := set(request) - {"gpu", *more}:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not a field of this verb")
        asked = request.get("gpu")
        names = ((gpu, (gpu.uuid, short_bus_id(gpu.pci_bus_id))) for gpu in self.gone())
        return next((gpu for gpu, called_so in names if asked and asked in called_so), None)

    def _drop_missing(self, gone: Gpu) -> tuple[str, str]:
        """Drop all that is remembered of a GPU that is not listed. Returns the arguments of `_done`.

        Raises RefusedError if nothing is.
        """
        monitor = self._now.monitor
        dismissed = bool(gone.uuid) and monitor is not None and monitor.dismiss(gone.uuid)
        if not self._health.drop_past(gone.uuid) and not dismissed:
            raise RefusedError(f"{_state_of(gone)}: {gone.unreadable}. To forget: nothing is written down of it")
        text = f"{_state_of(gone)}; what was written down of it is forgotten."
        still = (gpu for gpu in self.gone() if gone.pci_bus_id and gpu.pci_bus_id == gone.pci_bus_id)
        return text + "".join(f" It stays missing: {gpu.unreadable}." for gpu in still), ""

    def _drop_cordon(self, gone: Gpu) -> tuple[str, str]:
        """Drop the remembered cordon of a GPU that is not listed, if there is one. Returns the arguments of `_done`."""
        cordoned = self._health.drop_past(gone.uuid, orders.CORDON)
        text = f"{_state_of(gone)}. " + (
            "Its cordon is lifted." if cordoned else "It has no cordon, so nothing was changed."
        )
        unfit = (Verdict.FATAL.name, Verdict.DEGRADED.name)
        held = [entry for entry in self._health.past if entry.uuid == gone.uuid and entry.verdict in unfit]
        if held:
            stands = dict.fromkeys(f"{entry.detail or entry.signal} ({entry.verdict})" for entry in held)
            text += f" Still held against it: {'; '.join(stands)}."
        if not gone.uuid or gone.uuid not in {gpu.uuid for gpu in self.gone()}:
            return text, ""
        return text, f" To forget it: gpu-plugin uncordon --gpu {gone.uuid} --override."

    def _is_open(self, gpu: Gpu, signal: str) -> bool:
        return any(key.signal == signal for key, _, _ in self._health.ledger.standing(gpu.uuid))

    def _open_faults(self, gpu: Gpu) -> dict[str, Verdict]:
        """What stands against a GPU or a MIG device of it, in the words of its signals, the worst first."""
        found: dict[str, Verdict] = {}
        standing = [
            entry
            for entry in self._health.ledger.standing(gpu.uuid, None)
            if not SIGNALS[entry[0].signal].of_process  # a good look ends it, whatever anybody says
        ]
        for key, latch, verdict in sorted(standing, key=lambda entry: (-entry[2], entry[1].since)):
            where = f" (MIG device {key.device})" if key.device else ""
            found.setdefault(f"{latch.detail or key.signal}{where}", verdict)
        return found

    async def _done(self, outcome: str, advice: str = "") -> Mapping[str, object]:
        """The answer to an order that was obeyed: `done` for who gave it, `outcome` (without advice) to be remembered.

        Raises RefusedError where it would not outlive the process.
        """
        if await self._recorder.written():
            return {"done": outcome + advice, "outcome": outcome}
        raise RefusedError(
            f"{outcome.removesuffix('.')}. But this could not be written down, and a restart of the daemon forgets it: "
            "see that there is room in the state directory, then give the order again"
        )


def _state_of(gone: Gpu) -> str:
    return f"{absent.named(gone)} is {'missing' if gone.unreadable else 'not known on this node'}"


def _names(gpus: Iterable[Gpu]) -> str:
    named = tuple(gpus)
    if len(named) > 2:
        return f"{len(named)} GPUs ({', '.join(str(gpu.index) for gpu in named)})"
    return " and ".join(map(called, named)) or "All GPUs, of which none is known yet"


def _state(explained: Mapping[str, Any]) -> Mapping[str, object]:
    """The status's entry of a GPU, from its explanation."""
    state = "degraded" if Verdict[explained["verdict"]] >= Verdict.DEGRADED else "healthy"
    return {
        "index": explained["index"],
        "uuid": explained["uuid"],
        "state": "unhealthy" if explained["health"] == "Unhealthy" else state,
        "verdict": explained["verdict"],
        "reasons": list(dict.fromkeys(signal["detail"] for signal in explained["signals"])),
        "measures": [reading for signal in explained["signals"] for reading in signal.get("readings", ())],
    }


def _changed(before: Mapping[str, Verdict], after: Mapping[str, Verdict]) -> str:
    """What an override changed, in words; empty for nothing."""
    forgotten = [words for words in before if words not in after]
    lowered = [words for words, verdict in before.items() if after.get(words, verdict) is not verdict]
    parts = [f"{'; '.join(forgotten)} {are(len(forgotten))} forgotten"] if forgotten else []
    parts += [f"{'; '.join(lowered)} {are(len(lowered))} no more than DEGRADED"] if lowered else []
    return ", ".join(parts)
