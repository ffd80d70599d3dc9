"""Whether the configuration can be: doctor goes by the same as the daemon does."""

from gpu_plugin.doctor.check import Finding, check, failed, note, ok, seen
from gpu_plugin.doctor.facts import Facts

_WITHOUT = "the checks go by flags and environment only"


@check("configuration")
def configuration(facts: Facts) -> Finding:
    """Fails where it is refused; everything else then goes by flags and environment."""
    settings = facts.settings
    if refused := seen(facts.configuration, _WITHOUT, needed=True):
        return failed(
            f"{refused}; {_WITHOUT}",
            "fix it; `gpu-plugin validate FILE` lists everything that is wrong with a file",
        )
    if facts.file:
        return ok(f"{facts.file} can be used")
    if settings.config_file_srcdir:
        return note(
            f"a label of the Node names a file in {settings.config_file_srcdir}, and no daemon says which: {_WITHOUT}",
            "give the file with --config-file in the place of --config-file-srcdir",
        )
    return ok("no file: flags, environment and defaults")
