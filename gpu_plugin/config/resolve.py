"""Resolve the settings: flag > environment > file > default. Each value is read once, and every fault names its place."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from gpu_plugin.config.document import Document, is_manifest
from gpu_plugin.config.errors import ConfigError, Fault
from gpu_plugin.config.settings import OPTIONS, Option, Settings
from gpu_plugin.config.sharing import MPS
from gpu_plugin.config.socket_path import LONGEST, room
from gpu_plugin.config.values import AUTO
from gpu_plugin.config.words import shortened

SOCKET_NAME = 35  # bytes of the shortest name of our sockets, with the slash before it


class _File(msgspec.Struct, frozen=True):
    """The content of a file."""

    document: Document
    settings: Mapping[str, Any] = {}  # valid values
    invalid: Collection[str] = ()  # names of options
    faults: Sequence[Fault] = ()
    remarks: Sequence[Fault] = ()  # which are no faults
    without_effect: Sequence[Fault] = ()


def resolve(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Document | Mapping[str, object] | None = None
) -> Settings:
    """Return the settings of these sources.

    A fault of a value in the file is only a remark of the settings if a flag or the environment overrules the value. Any other
    fault raises ConfigError.

    Args:
        flags: values of the command line by option name; None for a flag that is not given.
        environ: environment variables. An empty variable counts as not set (in NVIDIA's plugin it sets the option to false or
            to an empty text). Only KUBELET_SOCKET may be empty: then the plugin does not register.
        file: the config file with its line numbers, or its parsed content; None without a file.

    Raises:
        ConfigError: there are invalid values, unknown keys, or options that contradict each other. `faults` has all of them.
    """
    document = file if isinstance(file, Document) else Document.of(file, chosen(flags, environ) or "config file")
    read = _read_file(document)
    found = dict(read.settings)
    faults: list[Fault] = []
    unsure: set[str] = set()
    sources: dict[str, str] = {}
    for option in OPTIONS:
        if (given := _given(option, flags, environ)) is not None:
            written, source = given
            sources[option.name] = source
            try:
                found[option.name] = option.parse(written)
            except ValueError as error:
                faults.append(Fault(str(error), source))
                unsure.add(option.name)
    unsure |= {*read.invalid} - sources.keys()
    remarks, wrong = _split(read.faults, sources)
    unused = () if found.get("config_file_srcdir") else _without_effect(sources)
    settings = Settings(**found, remarks=(*remarks, *read.remarks), without_effect=(*unused, *read.without_effect))
    faults += [*wrong, *(fault for fault, names in _contradictions(settings, read) if not names & unsure)]
    if faults:
        raise ConfigError.of(sorted(faults, key=attrgetter("line")))
    return settings


def chosen(flags: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """Return the path of the config file from flags and environment; empty without a file."""
    return str(flags.get("config_file") or environ.get("CONFIG_FILE") or "")


def _read_file(document: Document) -> _File:
    if not document.content:
        return _File(document)
    if is_manifest(document.content):
        kind = shortened(str(document.content["kind"]), 40)
        reason = (
            f"this is a Kubernetes manifest ({kind}): give one of the files in its data, without the manifest around it"
        )
        raise ConfigError.of([document.fault(("kind",), reason)])
    # The schema is needed only with a file.
    from gpu_plugin.config.schema import Reader  # noqa: PLC0415
    from gpu_plugin.config.schema_v1 import File, name_patterns  # noqa: PLC0415
    from gpu_plugin.config.sharing_section import shared_resources  # noqa: PLC0415
    from gpu_plugin.config.switching import remarks_on_switching, unshared  # noqa: PLC0415

    reader = Reader(document, File)
    file = reader.section(File, (), document.content) or File()
    gpu_names = name_patterns(reader, "gpus", file.resources.gpus)
    mig_names = name_patterns(reader, "mig", file.resources.mig)
    sharing = shared_resources(reader, file.sharing, [pattern.name for pattern in mig_names])
    settings = {
        **reader.options,
        "sharing": sharing,
        "gpu_names": gpu_names,
        "mig_names": mig_names,
        "verdicts": file.health.verdicts(),
    }
    remarks = remarks_on_switching(document, file)
    return _File(document, settings, reader.invalid, reader.faults, remarks, unshared(document, file))


def _given(option: Option, flags: Mapping[str, object], environ: Mapping[str, str]) -> tuple[object, str] | None:
    """Return the text of the flag, or else of a variable, and its name for messages; None if neither is given."""
    if (flag := flags.get(option.name)) is not None:
        return flag, f"--{option.flags[0]}"
    for env in option.envs:
        written = environ.get(env)
        if written or (written is not None and option.name == "kubelet_socket"):
            return written, f"environment variable {env}"
    return None


def _without_effect(sources: Mapping[str, str]) -> Iterator[Fault]:
    """Return a fault for each flag or variable that chooses a config file although no directory of files is set."""
    reason = (
        "has no effect without --config-file-srcdir (CONFIG_FILE_SRCDIR), which names the directory of config files: no file of "
        "such a directory is in force"
    )
    for name in ("default_config", "fallback_strategies", "node_label"):
        if name in sources:
            yield Fault(reason, sources[name])


def _split(faults: Iterable[Fault], overruled: Collection[str]) -> tuple[list[Fault], list[Fault]]:
    """Split faults into remarks on overruled values of the file, and the other faults."""
    flags = {option.file: option.flags[0] for option in OPTIONS if option.file and option.name in overruled}
    remarks, wrong = [], []
    for fault in faults:
        if flag := flags.get(fault.path.partition("[")[0]):
            reason = f"{fault.reason}; --{flag} or the environment overrules it, so it does no harm"
            remarks.append(fault._replace(reason=reason))
        else:
            wrong.append(fault)
    return remarks, wrong


def _contradictions(settings: Settings, read: _File) -> Iterator[tuple[Fault, set[str]]]:
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
        in_file = "exclude_gpus" in read.settings
        fault = read.document.fault(("selection", "exclude"), reason) if in_file else Fault(reason, "--exclude-gpus")
        yield fault, {"include_gpus", "exclude_gpus"}
    if any(entry.strategy == MPS for entry in settings.sharing):
        if settings.mig_strategy == "mixed":
            reason = "using --mig-strategy=mixed is not supported with MPS"
            yield read.document.fault(("sharing", "mps"), reason), {"mig_strategy"}
        if not settings.mps_root:
            reason = (
                "using MPS requires --mps-root to be specified: the host directory in which clients find the MPS daemon"
            )
            yield read.document.fault(("sharing", "mps"), reason), {"mps_root"}
