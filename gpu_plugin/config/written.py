"""Write settings as the content of a config file, and list the settings that differ from the defaults."""

from collections.abc import Sequence

import msgspec

from gpu_plugin.config.settings import DEFAULTS, OPTIONS, Settings
from gpu_plugin.config.sharing import SECTIONS, SharedResource
from gpu_plugin.config.values import spell_duration


def written(settings: Settings) -> dict[str, object]:
    """Return the content of a file that resolves to the same settings, except for options without a key in the file."""
    content: dict[str, object] = {"version": "v1"}
    for option in OPTIONS:
        value = getattr(settings, option.name)
        if option.file and value is not None:
            _put(content, option.file.split("."), plain(value))
    for key, patterns in (("gpus", settings.gpu_names), ("mig", settings.mig_names)):
        if patterns:
            _put(content, ["resources", key], [msgspec.to_builtins(each) for each in patterns])
    for key, strategy in SECTIONS.items():
        entries = [entry for entry in settings.sharing if entry.strategy == strategy]
        if entries:
            section = {
                "failRequestsGreaterThanOne": entries[0].single_requests,
                "resources": [_entry(entry) for entry in entries],
            }
            _put(content, ["sharing", key], section)
    if health := msgspec.to_builtins(settings.verdicts):
        content["health"] = health
    return content


def _put(content: dict[str, object], path: Sequence[str], value: object) -> None:
    *above, last = path
    for key in above:
        inner = content.setdefault(key, {})
        assert isinstance(inner, dict)
        content = inner
    content[last] = value


def _entry(entry: SharedResource) -> dict[str, object]:
    """Return an entry. For all devices, `devices` is left out: with other entries this means all devices that are left."""
    content: dict[str, object] = {"name": entry.name, "rename": entry.offered_as, "replicas": entry.replicas}
    if not entry.devices.everything:
        content["devices"] = list(entry.devices.listed) or entry.devices.count
    if limits := msgspec.to_builtins(entry.limits):
        content["limits"] = limits
    return content


def differing(settings: Settings) -> list[str]:
    """Return the settings that differ from the defaults as "key: value", with the key of the file, the flag or the variable."""
    found = []
    for option in OPTIONS:
        value = getattr(settings, option.name)
        if value != getattr(DEFAULTS, option.name):
            name = option.file or (f"--{option.flags[0]}" if option.flags else option.envs[0])
            found.append(f"{name}: {_as_text(plain(value))}")
    for key, patterns in (("resources.gpus", settings.gpu_names), ("resources.mig", settings.mig_names)):
        found += [f"{key}: {pattern.pattern} is {pattern.name}" for pattern in patterns]
    found += [f"sharing: {_shared(entry)}" for entry in settings.sharing]
    for key, words in msgspec.to_builtins(settings.verdicts).items():
        found += [f"health.{key}.{name}: {word}" for name, word in words.items()]
    return found


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "nothing"


def _shared(entry: SharedResource) -> str:
    """Return an entry as text: nvidia.com/gpu as nvidia.com/gpu.shared, 4 replicas of each by time-slicing."""
    renamed = "" if entry.offered_as == entry.name else f" as {entry.offered_as}"
    some = entry.devices
    of = "" if some.everything else f" of {','.join(some.listed) or some.count}"
    if entry.replicas == 1:
        return f"{entry.name}{of}{renamed}, not shared"
    return f"{entry.name}{of}{renamed}, {entry.replicas} replicas of each by {entry.strategy}"


def plain(value: object) -> object:
    """Return an option's value in the form of a file."""
    if isinstance(value, float):
        return spell_duration(value)
    return list(value) if isinstance(value, tuple) else value
