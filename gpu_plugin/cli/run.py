"""`gpu-plugin run`: the daemon."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.options import OPTIONS, Option
from gpu_plugin.config.resolve import chosen, ineffective, resolve
from gpu_plugin.config.settings import Settings

MAX_CONFIG_BYTES = 3 * 1024 * 1024
"""More than a ConfigMap can hold (1 MiB)."""


def settings_from(flags: Mapping[str, object], environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """Settings from the command line, the environment and the file they name; and options set that have no effect.

    Raises:
        ConfigError: a value that cannot be, with the place it stands at.
    """
    name = chosen(flags, environ)
    file = _read(name) if name else None
    return resolve(flags, environ, file), ineffective(flags, environ, file)


def _read(name: str) -> Mapping[str, object]:
    import yaml  # noqa: PLC0415 - 9 ms and 1 MiB for those alone who have a file

    try:
        with Path(name).open("rb") as stream:
            text = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config-file {name}: {error.strerror}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"--config-file {name}: more than {MAX_CONFIG_BYTES} bytes")
    try:
        content = yaml.load(text, _strict_loader(yaml))  # noqa: S506 - a safe loader, made stricter
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config-file {name}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {name}: holds a {type(content).__name__}, not a mapping")
    return content


def _strict_loader(yaml: ModuleType) -> Any:
    """The safe loader, which refuses a key that stands twice instead of taking the last."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
            written = [
                key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"
            ]  # "<<" yields to what stands here
            keys = [self.construct_object(key, deep=True) for key in written]
            for at, key in enumerate(keys):
                if key in keys[:at]:
                    raise yaml.YAMLError(
                        f"the key {key!r} stands twice, again on line {written[at].start_mark.line + 1}"
                    )
            return super().construct_mapping(node, deep)

    return Loader


def _flag(option: Option) -> Callable[[Any], Any]:
    names = [f"--{flag}" for flag in option.flags]
    envs = ", ".join(f"${env}" for env in option.envs)
    default = "" if option.default in (None, "") else f" [default: {str(option.default).lower()}]"
    text = f"{option.help}{default} [{envs}]"
    more: dict[str, Any] = {}
    if option.switch:
        more = {"is_flag": False, "flag_value": "true", "metavar": "[true|false]"}
    elif option.name in {"device_list_strategy", "cdi_feature_flags", "cdi_disable_hooks", "imex_channel_ids"}:
        more = {"multiple": True, "metavar": "LIST"}
    return click.option(*names, option.name, default=None, help=text, **more)


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(OPTIONS):
        if option.flags:
            command = _flag(option)(command)
    return command


@click.command(name="run")
@_with_options
def command(**given: object) -> int:
    """Serve this node's GPUs to its kubelet until told to stop.

    Flags win over environment variables, those over the config file. Ends on SIGTERM, SIGINT or SIGQUIT; SIGHUP
    reads the configuration again.
    """
    flags = {
        name: (",".join(value) if value else None) if isinstance(value, tuple) else value
        for name, value in given.items()
    }
    try:
        settings, idle = settings_from(flags, os.environ)
    except ConfigError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None

    from gpu_plugin import daemon  # noqa: PLC0415 - usage and help need none of it
    from gpu_plugin.telemetry import logs  # noqa: PLC0415

    logs.configure(settings.log_format, settings.log_level)
    if idle:
        daemon.log.warning("accepted without effect in this version: --%s", ", --".join(idle))
    try:
        return daemon.run(settings, lambda: settings_from(flags, os.environ)[0])
    except ConfigError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
