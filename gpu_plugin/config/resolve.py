"""Resolve the settings: flag > environment > file > default. Each value is read once, and every fault names its place."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, cast

import msgspec

from gpu_plugin.config.document import Document, at, is_manifest, unrendered
from gpu_plugin.config.errors import ConfigError, Fault
from gpu_plugin.config.options import Option
from gpu_plugin.config.settings import OPTIONS, Settings
from gpu_plugin.config.sharing import MPS
from gpu_plugin.config.socket_path import LONGEST, room
from gpu_plugin.config.values import AUTO
from gpu_plugin.config.words import shortened

File = Document | Mapping[str, object] | None
"""A config file with its line numbers, the parsed content of a file, or no file."""


SOCKET_NAME = 35
"""Bytes of the shortest name of our sockets, with the slash before it."""


class _Written(msgspec.Struct, frozen=True):
    """A file's content: its values after parsing, its faults, and its remarks, which are not faults."""

    document: Document
    content: Mapping[str, object]
    sections: Mapping[str, Any]
    faults: tuple[Fault, ...]
    remarks: tuple[Fault, ...] = ()
    without_effect: tuple[Fault, ...] = ()


def resolve(flags: Mapping[str, object], environ: Mapping[str, str], file: File = None) -> Settings:
    """Return the settings of these sources.

    A fault of a value in the file is only a remark of the settings if a flag or the environment overrules the value. Any other
    fault raises ConfigError.

    Args:
        flags: values of the command line by option name; None for a flag that is not given.
        environ: environment variables. An empty variable counts as not set (in NVIDIA's plugin it sets the option to false or
            to an empty text). Only KUBELET_SOCKET may be empty: then the plugin does not register.
        file: the config file.

    Raises:
        ConfigError: there are invalid values, unknown keys, or options that contradict each other. `faults` has all of them.
    """
    document = file if isinstance(file, Document) else Document.of(file, chosen(flags, environ) or "config file")
    written = _read_file(document)
    found: dict[str, Any] = {}
    faults: list[Fault] = []
    unsure: set[str] = set()
    for option in OPTIONS:
        try:
            if (value := _value(option, flags, environ, written.content)) is not None:
                found[option.name] = value
        except ConfigError as error:
            faults += error.faults
            unsure.add(option.name)
    overruled = {option.name for option in OPTIONS if _given(option, flags, environ) is not None}
    remarks, wrong = _remarks_and_faults(written.faults, overruled)
    faults += wrong
    unsure |= _faulty(written) - overruled
    unused = () if found.get("config_file_srcdir") else tuple(_without_effect(flags, environ))
    settings = Settings(
        **found,
        **written.sections,
        remarks=(*remarks, *written.remarks),
        without_effect=(*unused, *written.without_effect),
    )
    faults += [fault for fault, names in _contradictions(settings, written.document) if not names & unsure]
    if faults:
        raise ConfigError.of(sorted(faults, key=attrgetter("line")))
    return settings


def chosen(flags: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """Return the path of the config file from flags and environment; empty without a file."""
    return str(flags.get("config_file") or environ.get("CONFIG_FILE") or "")


def _read_file(document: Document) -> _Written:
    if not document.content:
        return _Written(document, {}, {}, ())
    if is_manifest(document.content):
        kind = shortened(str(document.content["kind"]), 40)
        reason = (
            f"this is a Kubernetes manifest ({kind}): give one of the files in its data, without the manifest around it"
        )
        raise ConfigError.of([document.fault(("kind",), reason)])
    # The schema is needed only with a file.
    from gpu_plugin.config.health_section import verdicts  # noqa: PLC0415
    from gpu_plugin.config.schema import Checked, in_known_case  # noqa: PLC0415
    from gpu_plugin.config.schema_v1 import SCHEMA, name_patterns  # noqa: PLC0415
    from gpu_plugin.config.sharing_section import shared_resources  # noqa: PLC0415
    from gpu_plugin.config.switching import remarks_on_switching, unshared  # noqa: PLC0415

    document = in_known_case(SCHEMA, document)
    checked = Checked(document, SCHEMA)
    gpu_names, gpu_faults = name_patterns(document, checked.content, "gpus")
    mig_names, mig_faults = name_patterns(document, checked.content, "mig")
    sharing, sharing_faults = shared_resources(
        document, cast("Mapping[str, Any]", checked.content.get("sharing", {})), [pattern.name for pattern in mig_names]
    )
    templates = unrendered(document)
    places = {fault.path for fault in templates}
    others = (*checked.faults, *gpu_faults, *mig_faults, *sharing_faults)
    faults = (*templates, *(fault for fault in others if fault.path not in places))
    health = verdicts(cast("Mapping[str, Any]", checked.content.get("health", {})))
    sections = {"sharing": sharing, "gpu_names": gpu_names, "mig_names": mig_names, "verdicts": health}
    remarks, without_effect = tuple(remarks_on_switching(document)), tuple(unshared(document))
    return _Written(document, checked.content, sections, faults, remarks, without_effect)


def _faulty(written: _Written) -> set[str]:
    """Return the names of options with an invalid value in the file."""
    places = {option.name: tuple(option.file.split(".")) for option in OPTIONS if option.file}
    return {
        name
        for name, place in places.items()
        if at(written.document.content, place) is not None and at(written.content, place) is None
    }


def _value(
    option: Option, flags: Mapping[str, object], environ: Mapping[str, str], content: Mapping[str, object]
) -> object:
    """Return an option's value; None if it is not given. `content` is already parsed. Raises ConfigError for an invalid value."""
    if (given := _given(option, flags, environ)) is not None:
        written, source = given
        try:
            return option.parse(written)
        except ValueError as error:
            raise ConfigError.of([Fault(str(error), source)]) from None
    return at(content, tuple(option.file.split("."))) if option.file else None


def _given(option: Option, flags: Mapping[str, object], environ: Mapping[str, str]) -> tuple[object, str] | None:
    """Return the text of the flag, or else of a variable, and its name for messages; None if neither is given."""
    if (flag := flags.get(option.name)) is not None:
        return flag, f"--{option.flags[0]}"
    for env in option.envs:
        written = environ.get(env)
        if written or (written is not None and option.name == "kubelet_socket"):
            return written, f"environment variable {env}"
    return None


def _without_effect(flags: Mapping[str, object], environ: Mapping[str, str]) -> Iterator[Fault]:
    """Return a fault for each flag or variable that chooses a config file although no directory of files is set."""
    reason = (
        "has no effect without --config-file-srcdir (CONFIG_FILE_SRCDIR), which names the directory of config files: no file of "
        "such a directory is in force"
    )
    for option in OPTIONS:
        given = _given(option, flags, environ)
        if given is not None and option.name in {"default_config", "fallback_strategies", "node_label"}:
            yield Fault(reason, given[1])


def _remarks_and_faults(faults: Iterable[Fault], overruled: Collection[str]) -> tuple[list[Fault], list[Fault]]:
    """Split faults into remarks on overruled values of the file, and the other faults."""
    paths = {option.file: option for option in OPTIONS if option.file and option.name in overruled}
    remarks, wrong = [], []
    for fault in faults:
        option = paths.get(fault.path.partition("[")[0])
        if option is None:
            wrong.append(fault)
        else:
            by = f"--{option.flags[0]} or the environment" if option.flags else "the environment"
            remarks.append(fault._replace(reason=f"{fault.reason}; {by} overrules it, so it does no harm"))
    return remarks, wrong


def _contradictions(settings: Settings, document: Document) -> Iterator[tuple[Fault, set[str]]]:
    """Return the contradictions between options, each with the names of the options."""
    socket, directory = settings.kubelet_socket, settings.device_plugin_dir
    if socket and directory is not None and socket.rpartition("/")[0].rstrip("/") != directory.rstrip("/"):
        reason = f"--kubelet-socket {socket} is not in --device-plugin-dir {directory}"
        yield (
            Fault(f"{reason}: the kubelet looks for our socket in the directory of its own socket"),
            {"kubelet_socket", "device_plugin_dir"},
        )
    elif room(settings.socket_dir) < SOCKET_NAME:
        reason = (
            f"--device-plugin-dir {settings.socket_dir}: the path is too long, since a socket in it would exceed the kernel's "
            f"limit of {LONGEST} bytes; use a path of at most {LONGEST - SOCKET_NAME} bytes"
        )
        yield Fault(reason), {"kubelet_socket", "device_plugin_dir"}
    if settings.imex_required and settings.imex_channel_ids == AUTO:
        reason = "--imex-required needs --imex-channel-ids 0: with auto, a missing channel is not an error"
        yield Fault(reason), {"imex_required", "imex_channel_ids"}
    if settings.config_file and settings.config_file_srcdir:
        reason = (
            f"--config-file {settings.config_file} and --config-file-srcdir {settings.config_file_srcdir}: "
            "the settings come either from one file or from the file that a node label names; remove one of these options"
        )
        yield Fault(reason), {"config_file", "config_file_srcdir"}
    if settings.config_file_srcdir and not settings.node_name:
        reason = "must not be empty with --config-file-srcdir, because that node's label names the file"
        yield Fault(f"invalid --node-name: {reason}"), {"config_file_srcdir", "node_name"}
    excluded = frozenset(settings.exclude_gpus)
    both = [gpu for gpu in settings.include_gpus if gpu in excluded]
    if both:
        reason = f"{', '.join(both)} is also on the list of GPUs to include (--include-gpus, selection.include)"
        in_file = at(document.content, ("selection", "exclude")) is not None
        fault = document.fault(("selection", "exclude"), reason) if in_file else Fault(reason, "--exclude-gpus")
        yield fault, {"include_gpus", "exclude_gpus"}
    if any(entry.strategy == MPS for entry in settings.sharing):
        if settings.mig_strategy == "mixed":
            reason = "using --mig-strategy=mixed is not supported with MPS"
            yield document.fault(("sharing", "mps"), reason), {"mig_strategy"}
        if not settings.mps_root:
            reason = (
                "using MPS requires --mps-root to be specified: the host directory in which clients find the MPS daemon"
            )
            yield document.fault(("sharing", "mps"), reason), {"mps_root"}
