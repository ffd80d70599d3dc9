"""Check that CDI specifications can be written, if the device list strategy needs them."""

from gpu_plugin.config.values import AUTO
from gpu_plugin.config.words import counted
from gpu_plugin.containers.edits import is_cdi
from gpu_plugin.containers.strategy_choice import choose
from gpu_plugin.doctor.check import Finding, check, failed, note, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import Facts, Unknown

_OVERLAY = "overlay"


@check("cdi-directory")
def cdi_directory(facts: Facts) -> Finding:
    """Fail if the strategy needs CDI specifications and the directory is not writable."""
    settings = facts.settings
    if not any(is_cdi(each) or each == AUTO for each in settings.device_list_strategy):
        return skipped(f"{', '.join(settings.device_list_strategy)} needs no CDI specifications")
    if AUTO in settings.device_list_strategy and (
        isinstance(facts.evidence, Unknown) or not is_cdi(choose(facts.evidence, settings.cdi_dir).strategy)
    ):
        return skipped("auto chooses envvar, which needs no CDI specifications")
    known = seen(facts.cdi_directory, settings.cdi_dir, needed=True)
    if known.error:
        return failed(f"{known.path}: {known.error}", "run as root")
    if known.there and not known.is_directory:
        return failed(f"{known.path} is not a directory", "is --cdi-dir right?")
    if known.read_only or not known.writable:
        if not isinstance(facts.process, Unknown) and facts.process.uid and not known.read_only:
            return note(
                f"{known.path} cannot be written by uid {facts.process.uid}",
                "run doctor as root to see what the daemon may do",
            )
        return failed(
            f"{known.path} cannot be written{', since it is mounted read-only' if known.read_only else ''}: devices "
            "without a specification are Unhealthy",
            "mount the node's directory read-write, or name another that the runtime reads with --cdi-dir",
        )
    if known.filesystem == _OVERLAY and not isinstance(facts.process, Unknown) and facts.process.contained:
        return warning(
            f"{known.path} is part of this container's own file system: no runtime of the node sees the files in it",
            "mount the node's directory there",
        )
    if not isinstance(facts.cdi_conflicts, Unknown) and facts.cdi_conflicts:
        count = len(facts.cdi_conflicts)
        return failed(
            f"{counted(count, 'CDI device')} of this plugin cannot be given to containers, first: {facts.cdi_conflicts[0]}",
            "gpu-plugin cdi list names all of them",
        )
    if known.there and known.mode & 0o022:
        return warning(
            f"{known.path} has the mode {known.mode & 0o7777:04o}: others than its owner can replace specifications, and so "
            "give containers any file of this node",
            f"chmod go-w {known.path}",
        )
    return ok(f"{known.path} can be written")
