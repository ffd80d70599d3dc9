"""Read the released GPUs of a daemon's state directory without changing it."""

from pathlib import Path

import msgspec

from gpu_plugin.daemon.health_watch import EVERY_GPU
from gpu_plugin.health.evidence import decode
from gpu_plugin.health.signals import orders
from gpu_plugin.state.log import GPUS, HEALTH, read_log
from gpu_plugin.state.records import GpuRecord, HealthRecord


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
