"""Check that the configuration is valid and all of it has an effect, by the rules of the daemon."""

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, failed, note, ok, seen, warning
from gpu_plugin.doctor.node import Node

_WITHOUT = "the checks go by flags and environment only"


@check("configuration")
def configuration(node: Node) -> Finding:
    """Fail for a refused configuration (the other checks then use flags and environment), and warn of parts without effect."""
    settings = node.settings
    if refused := seen(node.configuration, _WITHOUT, needed=True):
        return failed(
            f"{refused}; {_WITHOUT}",
            "fix it; `gpu-plugin validate FILE` lists everything that is wrong with a file",
        )
    if settings.without_effect:
        return warning("; ".join(map(str, settings.without_effect)), "add what is missing, or remove these settings")
    if node.file:
        return ok(f"{node.file} can be used")
    if settings.config_file_srcdir:
        return note(
            f"a label of the Node names a file in {settings.config_file_srcdir}, and no daemon says which: {_WITHOUT}",
            "give the file with --config-file in the place of --config-file-srcdir",
        )
    return ok("no file: flags, environment and defaults")
