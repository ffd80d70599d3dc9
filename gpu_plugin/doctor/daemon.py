"""The status of the running daemon, and the releases of GPUs that a daemon has stored. Blocks."""

import os
from pathlib import Path

import msgspec

from gpu_plugin.daemon.health_watch import EVERY_GPU
from gpu_plugin.doctor.finding import Known, Unknown
from gpu_plugin.health.evidence import decode
from gpu_plugin.health.signals import orders
from gpu_plugin.runtime import control
from gpu_plugin.state.log import GPUS, HEALTH, read_log
from gpu_plugin.state.records import GpuRecord, HealthRecord
from gpu_plugin.status.model import Status


class Daemon(msgspec.Struct, frozen=True):
    """The status of the running daemon, None if no daemon answers; then `trouble` is the reason.

    `forbidden` is True if this process may not connect to the daemon's socket. `refused` is True if a daemon answered with an
    error, such as that it waits for another daemon; `trouble` is its text. `abandoned` is True if the socket exists and no
    process listens on it, so that the daemon was killed.
    """

    status: Status | None = None
    trouble: str = ""
    forbidden: bool = False
    refused: bool = False
    abandoned: bool = False


def read_daemon(state_dir: Path) -> Known[Daemon]:
    """Return the status of the daemon that uses this directory."""
    path = state_dir / control.SOCKET
    try:
        return Daemon(msgspec.convert(control.request(state_dir, "status"), Status))
    except msgspec.ValidationError as error:
        return Unknown(f"the daemon is of another version, so its status is not known here ({error})")
    except control.SilentDaemonError as error:
        return Unknown(str(error), hung=True)
    except control.NoDaemonError as error:
        forbidden = _forbidden(path)
        abandoned = not forbidden and path.is_socket() and not control.answers(state_dir)
        return Daemon(trouble=str(error), forbidden=forbidden, abandoned=abandoned)
    except control.ControlError as error:
        return Daemon(trouble=str(error), refused=True)


def released_gpus(status: Status) -> tuple[str, ...]:
    """Return the indices of the GPUs in a daemon's status that an operator has released for maintenance."""
    return tuple(str(gpu.index) for gpu in status.gpus if any(each.name == orders.MAINTENANCE for each in gpu.signals))


def written_releases(state_dir: Path, boot_id: str) -> tuple[str, ...]:
    """Return the released GPUs that `Memory` stored in this boot, by index, or by uuid if the index is unknown; `*` for all.

    The log is only read, never repaired. Blocks. An empty `boot_id` means any boot.

    Raises:
        OSError: a file of the log cannot be read.
        ValueError: the record of health is malformed, or a record that may have been newer is damaged.
    """
    content = read_log(state_dir)
    for error in content.errors.values():
        raise error
    if content.unreadable:
        raise ValueError(f"{content.unreadable} lines of the state log are damaged")
    health = content.latest.get(HEALTH)
    written = () if health is None else msgspec.json.decode(health.content.decode(), type=HealthRecord).evidence
    entries = [decode(raw) for raw in written]
    uuids = {
        each.uuid
        for each in entries
        if each.known and orders.released(each.latch) and (each.lasts or not boot_id or each.boot_id == boot_id)
    }
    if EVERY_GPU in uuids:
        return (EVERY_GPU,)
    gpus = content.latest.get(GPUS) if uuids else None
    indices = {} if gpus is None else _indices(gpus.content)
    return tuple(sorted((indices.get(uuid, uuid) for uuid in uuids), key=lambda name: (len(name), name)))


def _indices(content: bytes) -> dict[str, str]:
    """Return the index of each stored GPU by its uuid; an empty mapping if the record is malformed."""
    try:
        known = msgspec.json.decode(content.decode(), type=GpuRecord)
    except ValueError:
        return {}
    return {gpu.uuid: str(gpu.index) for gpu in known.gpus}


def _forbidden(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, os.W_OK, effective_ids=True)
