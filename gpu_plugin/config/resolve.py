"""Flag > environment > file > default, each value read once and every fault named with the place it stands at."""

import difflib
from collections.abc import Mapping

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.options import OPTIONS, Option
from gpu_plugin.config.settings import Settings

# Sections of NVIDIA's schema that are another program's business: read past, never obeyed.
_FOREIGN = frozenset({"flags.gfd", "flags.useNodeFeatureAPI"})
# Sections of the schema that this version cannot honour: an operator who wrote them must hear of it.
_UNSERVED = ("sharing", "resources")


def resolve(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Mapping[str, object] | None = None
) -> Settings:
    """The settings that these sources ask for.

    Args:
        flags: values of the command line by option name; None for a flag that was not given.
        environ: environment variables. One that is set but empty counts as not set (NVIDIA's plugin differs: there it
            sets the option to false or nothing). KUBELET_SOCKET alone may be set to nothing, which asks for no registration.
        file: the parsed config file.

    Raises:
        ConfigError: a value that cannot be, a key nobody knows, or two options that contradict each other.
    """
    where = chosen(flags, environ) or "config file"
    written = flatten(file or {}, where)
    settings = Settings(**{option.name: _value(option, flags, environ, written, where) for option in OPTIONS})  # type: ignore[arg-type]
    _cross_check(settings)
    return settings


def chosen(flags: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """The config file that flags and environment name; empty for none."""
    return str(flags.get("config_file") or environ.get("CONFIG_FILE") or "")


def ineffective(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Mapping[str, object] | None
) -> list[str]:
    """Names of options that somebody set and that this version accepts without acting on them."""
    written = flatten(file or {}, where="config file")
    return [
        option.flags[0]
        for option in OPTIONS
        if not option.effective
        and (
            flags.get(option.name) is not None
            or any(environ.get(env) for env in option.envs)
            or (option.file and written.get(option.file))
        )
    ]


def _value(
    option: Option,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Mapping[str, object],
    where: str,
) -> object:
    flag = flags.get(option.name)
    if flag is not None:
        return _read(option, flag, f"--{option.flags[0]}")
    for env in option.envs:
        written = environ.get(env)
        if written or (written is not None and option.name == "kubelet_socket"):
            return _read(option, written, f"environment variable {env}")
    if option.file and option.file in file:
        return _read(option, file[option.file], f"{where}: {option.file}")
    if option.default is None:
        return None
    return option.parse(option.default)


def _read(option: Option, written: object, where: str) -> object:
    try:
        return option.parse(written)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def flatten(file: Mapping[str, object], where: str) -> dict[str, object]:
    """The config file's values by dotted key. Raises ConfigError for a key that is none, or a section we cannot honour."""
    if not isinstance(file, Mapping):
        raise ConfigError(f"{where}: the file is a {type(file).__name__}, not a mapping")
    known = {option.file for option in OPTIONS if option.file}
    found: dict[str, object] = {}
    for key, value in file.items():
        if key == "version":
            if value not in ("v1", "", None):
                raise ConfigError(f"{where}: version: unknown version {value!r}; this plugin reads v1")
        elif key in _UNSERVED:
            if value:
                raise ConfigError(f"{where}: {key}: this version of gpu-plugin cannot do that; remove the section")
        else:
            _descend("", str(key), value, known, found, where)
    return found


def _descend(above: str, name: str, value: object, known: set[str], found: dict[str, object], where: str) -> None:
    key = f"{above}{name}"
    if "." in name:
        raise ConfigError(f"{where}: {key}: unknown key; nest mappings instead of writing dots")
    if key in known:
        if value is not None:
            found[key] = value
    elif key in _FOREIGN:
        return
    elif any(name.startswith(f"{key}.") for name in known):
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {key}: a mapping is needed here, not {value!r}")
        for below, inner in value.items():
            _descend(f"{key}.", str(below), inner, known, found, where)
    else:
        near = difflib.get_close_matches(
            key, [*known, *_FOREIGN, *_UNSERVED, "version", "flags", "flags.plugin", "imex"], 1
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where}: {key}: unknown key{hint}")


def _cross_check(settings: Settings) -> None:
    socket, directory = settings.kubelet_socket, settings.device_plugin_dir
    if socket and directory is not None and socket.rpartition("/")[0].rstrip("/") != directory.rstrip("/"):
        raise ConfigError(
            f"--kubelet-socket {socket} does not lie in --device-plugin-dir {directory}: "
            "the kubelet looks for our socket beside its own",
        )
    if settings.device_discovery_strategy == "tegra":
        raise ConfigError("--device-discovery-strategy: tegra is not served by this version; use auto or nvml")
    # The kernel's limit for a socket path is 107 bytes (sun_path); our shortest file name needs up to 34 of them.
    if len(settings.socket_dir.encode()) > 72:
        raise ConfigError(
            f"--device-plugin-dir {settings.socket_dir}: too long, a socket in it would pass the kernel's 107 bytes; "
            "use a path of at most 72 bytes",
        )
