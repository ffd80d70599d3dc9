"""Check that CDI specifications can be written, if the device list strategy needs them."""

from pathlib import Path

from gpu_plugin.config.values import AUTO
from gpu_plugin.config.words import counted
from gpu_plugin.containers.edits import is_cdi
from gpu_plugin.containers.strategy_choice import choose
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.directory import read_directory, unwritable_by
from gpu_plugin.doctor.finding import Finding, Unknown, failed, ok, seen, skipped, warning
from gpu_plugin.doctor.node import Node


def read_conflicts(path: str) -> tuple[str, ...]:
    """Return a sentence for each device of this plugin that two files of a directory define, so that runtimes refuse it."""
    from gpu_plugin.containers.cdi_files.files import NameConflicts  # noqa: PLC0415 - only CDI needs it

    return tuple(NameConflicts(Path(path)).find().values())


@check("cdi-directory")
def cdi_directory(node: Node) -> Finding:
    """Fail if the strategy needs CDI specifications and the directory is not writable."""
    settings = node.settings
    if not any(is_cdi(each) or each == AUTO for each in settings.device_list_strategy):
        return skipped(f"{', '.join(settings.device_list_strategy)} needs no CDI specifications")
    if AUTO in settings.device_list_strategy:
        evidence = node.evidence()
        if isinstance(evidence, Unknown) or not is_cdi(choose(evidence, settings.cdi_dir).strategy):
            return skipped("auto chooses envvar, which needs no CDI specifications")
    known = seen(
        node.known("cdi_directory", read_directory, settings.cdi_dir, node.root), settings.cdi_dir, needed=True
    )
    if known.error:
        return failed(f"{known.path}: {known.error}", "run as root")
    if known.there and not known.is_directory:
        return failed(f"{known.path} is not a directory", "is --cdi-dir right?")
    if not known.writable and not known.read_only and node.uid():
        return unwritable_by(node.uid(), known.path)
    if known.read_only or not known.writable:
        return failed(
            f"{known.path} cannot be written{', since it is mounted read-only' if known.read_only else ''}: devices "
            "without a specification are Unhealthy",
            "mount the node's directory read-write, or name another that the runtime reads with --cdi-dir",
        )
    if known.filesystem == "overlay" and node.contained():
        return warning(
            f"{known.path} is part of this container's own file system: no runtime of the node sees the files in it",
            "mount the node's directory there",
        )
    conflicts = node.known("cdi_conflicts", read_conflicts, settings.cdi_dir)
    if not isinstance(conflicts, Unknown) and conflicts:
        return failed(
            f"{counted(len(conflicts), 'CDI device')} of this plugin cannot be given to containers, first: {conflicts[0]}",
            "gpu-plugin cdi list names all of them",
        )
    if known.there and known.mode & 0o022:
        return warning(
            f"{known.path} has the mode {known.mode & 0o7777:04o}: others than its owner can replace specifications, and so "
            "give containers any file of this node",
            f"chmod go-w {known.path}",
        )
    return ok(f"{known.path} can be written")
