"""What of the settings is not the default, for a line of the log. Needs nothing of the config file's schema."""

from gpu_plugin.config.options import OPTIONS
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.config.values import spell_duration


def differing(settings: Settings) -> list[str]:
    """What of the settings is not the default, each as "key: value" with the key of the file, or the flag where it has none."""
    told = []
    for option in OPTIONS:
        value = getattr(settings, option.name)
        default = None if option.default is None else option.parse(option.default)
        if value != default:
            name = option.file or (f"--{option.flags[0]}" if option.flags else option.envs[0])
            told.append(f"{name}: {_in_words(plain(value))}")
    for key, patterns in (("resources.gpus", settings.gpu_names), ("resources.mig", settings.mig_names)):
        told += [f"{key}: {pattern.pattern} is {pattern.name}" for pattern in patterns]
    told += [f"sharing: {_shared(entry)}" for entry in settings.sharing]
    said = settings.verdicts
    for key, words in (("xid", said.xids), ("xidClass", said.xid_classes), ("signals", said.signals)):
        told += [f"health.{key}.{name}: {word}" for name, word in words]
    return told


def _in_words(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "nothing"


def _shared(entry: SharedResource) -> str:
    """An entry as one reads it aloud: nvidia.com/gpu as nvidia.com/gpu.shared, 4 replicas of each by time-slicing."""
    renamed = "" if entry.offered_as == entry.name else f" as {entry.offered_as}"
    some = entry.devices
    of = "" if some.everything else f" of {','.join(some.listed) or some.count}"
    return f"{entry.name}{of}{renamed}, {entry.replicas} replicas of each by {entry.strategy}"


def plain(value: object) -> object:
    """An option's value as a file holds it."""
    if isinstance(value, float):
        return spell_duration(value)
    return list(value) if isinstance(value, tuple) else value
