"""Settings as a config file that asks for them: what a file comes to, with every default and every name written out."""

from collections.abc import Sequence

from gpu_plugin.config.differing import plain
from gpu_plugin.config.options import OPTIONS
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.sharing import MPS, NamePattern, SharedResource
from gpu_plugin.config.sharing_section import SECTIONS


def written(settings: Settings) -> dict[str, object]:
    """The content of a file that resolves to these settings again, but for those that no file can hold."""
    content: dict[str, object] = {"version": "v1"}
    for option in OPTIONS:
        value = getattr(settings, option.name)
        if option.file and value is not None:
            _put(content, option.file.split("."), plain(value))
    for key, patterns in (("gpus", settings.gpu_names), ("mig", settings.mig_names)):
        if patterns:
            _put(content, ["resources", key], _patterns(patterns))
    for key, strategy in SECTIONS.items():
        entries = [entry for entry in settings.sharing if entry.strategy == strategy]
        if entries:
            section = {
                "failRequestsGreaterThanOne": entries[0].single_requests,
                "resources": [_entry(entry) for entry in entries],
            }
            _put(content, ["sharing", key], section)
    said = settings.verdicts
    for key, words in (("xid", said.xids), ("xidClass", said.xid_classes), ("signals", said.signals)):
        if words:
            _put(content, ["health", key], dict(words))
    return content


def _put(content: dict[str, object], path: Sequence[str], value: object) -> None:
    *above, last = path
    for key in above:
        inner = content.setdefault(key, {})
        assert isinstance(inner, dict)
        content = inner
    content[last] = value


def _patterns(patterns: Sequence[NamePattern]) -> list[dict[str, str]]:
    return [{"pattern": pattern.pattern, "name": pattern.name} for pattern in patterns]


def _entry(entry: SharedResource) -> dict[str, object]:
    """One entry. `devices` is left out for all: next to other entries that means all that they leave."""
    content: dict[str, object] = {"name": entry.name, "rename": entry.offered_as, "replicas": entry.replicas}
    if not entry.devices.everything:
        content["devices"] = list(entry.devices.listed) or entry.devices.count
    if entry.strategy == MPS:
        percentage, memory = entry.limits.active_thread_percentage, entry.limits.pinned_memory
        limits = {"activeThreadPercentage": percentage, "pinnedMemory": memory}
        given = {key: value for key, value in limits.items() if value is not None}
        if given:
            content["limits"] = given
    return content
