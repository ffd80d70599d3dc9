"""Read the released GPUs of a daemon's state directory without changing it."""

from contextlib import suppress
from pathlib import Path

import msgspec

from gpu_plugin.daemon.health_watch import EVERY_GPU
from gpu_plugin.health.signals import orders
from gpu_plugin.runtime.regular_file import open_file
from gpu_plugin.state.directory import bounded
from gpu_plugin.state.journal import Journal
from gpu_plugin.state.records import GPUS_FILE, HEALTH_FILE, JOURNAL_FILE, GpuMemory, WrittenHealth, entry


def written_releases(state_dir: Path, boot_id: str) -> tuple[str, ...]:
    """Return the released GPUs that `Memory` stored in this boot, by index, or by uuid if the index is unknown; `*` for all.

    The files are only read, never repaired. Blocks. An empty `boot_id` means any boot.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is malformed.
    """
    try:
        found = msgspec.json.decode(bounded(state_dir / HEALTH_FILE).decode(), type=WrittenHealth)
    except FileNotFoundError:
        found = None
    with suppress(FileNotFoundError):
        open_file(state_dir / JOURNAL_FILE, links=False).close()
    newest = Journal(state_dir / JOURNAL_FILE, WrittenHealth).read()
    if newest is not None and (found is None or newest.sequence >= found.sequence):
        found = newest
    entries = [] if found is None else [entry(raw) for raw in found.evidence]
    uuids = {
        each.uuid
        for each in entries
        if each.known and orders.released(each.latch()) and (each.lasts or not boot_id or each.boot_id == boot_id)
    }
    if EVERY_GPU in uuids:
        return (EVERY_GPU,)
    indices = _indices(state_dir) if uuids else {}
    return tuple(sorted((indices.get(uuid, uuid) for uuid in uuids), key=lambda name: (len(name), name)))


def _indices(state_dir: Path) -> dict[str, str]:
    """Return the index of each stored GPU by its uuid; an empty mapping if the file cannot be read."""
    try:
        known = msgspec.json.decode(bounded(state_dir / GPUS_FILE).decode(), type=GpuMemory)
    except (OSError, ValueError, RecursionError):
        return {}
    return {gpu.uuid: str(gpu.index) for gpu in known.gpus}
