"""Builds the CDI specifications of a node from its GPUs, its device nodes, and the files of the driver.

The specifications need no program on the host. Each library is mounted under its SONAME in the default directories of a dynamic
loader, so that programs find it without ldconfig and without a variable. If the operator names NVIDIA's hook program, its hooks
do this instead (`toolkit_hooks`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from posixpath import dirname

import msgspec

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi import driver
from gpu_plugin.containers.cdi.host_files import DriverFiles, HostDevices, Library
from gpu_plugin.containers.cdi.options import ALL_HOOKS, NO_GIDS, NO_SOCKETS, CdiOptions
from gpu_plugin.containers.cdi.spec import DeviceNode, Edits, Hook, Mount, Spec, SpecDevice, made
from gpu_plugin.containers.edits import CONTROL_NODES, VISIBLE_DEVICES, imex_node
from gpu_plugin.devices.device import is_placeholder, mig_device, whole_gpu
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.devices.node import Gpu

# Mount options of files, and of sockets and their directories. NVIDIA uses the same, not always read-only (internal/discover). On
# a read-only mount, clients can connect to sockets and write to FIFOs, but they cannot replace them or change their mode.
READ_ONLY = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")

# Keeps NVIDIA's container runtime, if the node has it, from adding GPUs itself.
HIDDEN = f"{VISIBLE_DEVICES}=void"


class Built(msgspec.Struct, frozen=True):
    """The result of a build."""

    specs: Mapping[str, Spec] = msgspec.field(default_factory=dict)  # the specifications by file name
    trouble: str = ""  # why there is no working specification of the GPUs; empty if there is a working specification
    # Why a device is in no specification, by device name.
    missing: Mapping[str, str] = msgspec.field(default_factory=dict)
    complaints: tuple[str, ...] = ()  # sentences about files and device nodes that are left out


class Nodes(msgspec.Struct, frozen=True):
    """Makes device nodes for containers from the host's device nodes."""

    host: HostDevices
    options: CdiOptions

    def there(self, paths: Iterable[str]) -> list[str]:
        """Return the paths at which the host has a device node, without duplicates."""
        return [path for path in dict.fromkeys(paths) if path in self.host.nodes]

    def of(self, path: str) -> DeviceNode:
        """Return the device node at a path, which the host must have."""
        known = self.host.nodes[path]
        root = known.root if self.options.dev_root is None else self.options.dev_root
        return DeviceNode(
            path=path,
            host_path=f"{root}{path}" if root else "",
            type=known.type,
            major=known.major,
            minor=known.minor,
            file_mode=known.mode,
            permissions="rw",
            gid=known.gid or None,
        )

    def edits(self, paths: Iterable[str]) -> Edits:
        """Return container edits with these device nodes, and with the groups of nodes that not every user may open."""
        given = tuple(self.of(path) for path in paths)
        groups = {node.gid for node in given if node.gid and ((node.file_mode or 0) & 0o006) != 0o006}
        gids = () if NO_GIDS in self.options.feature_flags else tuple(sorted(groups))
        return Edits(device_nodes=given, additional_gids=gids)


def gpu_spec(devices: Iterable[SpecDevice], common: Edits) -> dict[str, Spec]:
    """Return the specification of the class gpu by its file name. Every container with a GPU gets the `common` edits."""
    return {cdi_names.file_name(cdi_names.GPU): made(cdi_names.kind(cdi_names.GPU), tuple(devices), common)}


def build(gpus: Sequence[Gpu], host: HostDevices, files: DriverFiles, options: CdiOptions) -> Built:
    """Build the specifications for these GPUs and all of their MIG devices."""
    nodes = Nodes(host, options)
    described = [gpu for gpu in gpus if not is_placeholder(gpu.uuid)]
    served: list[tuple[tuple[str, ...], list[str]]] = []
    missing: dict[str, str] = {}
    for gpu in sorted(described, key=attrgetter("index", "uuid")):
        for called, paths, more in _units(gpu, host):
            gone = [path for path in paths if path not in host.nodes]
            if gone or not paths:
                missing |= dict.fromkeys(called, _why_missing(gpu, gone, host.faults))
            else:
                served.append((called, nodes.there([*paths, *more])))
    owners = Counter(name for called, _ in served for name in called)
    missing = {name: why for name, why in missing.items() if name not in owners}
    ambiguous = [name for name, count in owners.items() if count > 1]
    missing |= dict.fromkeys(ambiguous, "the driver gives its name to two devices now")
    devices: list[SpecDevice] = []
    for called, given in served:
        edits = nodes.edits(given)
        devices += [SpecDevice(name=name, container_edits=edits) for name in called if owners[name] == 1]
    specs: dict[str, Spec] = {}
    trouble = files.fault
    if devices and not trouble:
        if cdi_names.ALL not in owners:
            every = dict.fromkeys(path for _, given in served for path in given)
            devices.append(SpecDevice(name=cdi_names.ALL, container_edits=nodes.edits(every)))
        specs = gpu_spec(devices, _common(nodes, files, options))
    elif not trouble and gpus and not described:
        trouble = "the driver could not describe any GPU of this node"
    elif not trouble and gpus:
        places = " or ".join(host.searched)
        trouble = f"no GPU of this node has its device node under {places}: {next(iter(missing.values()), '')}"
    for device_class, spec in _others(nodes, files, options):
        specs[cdi_names.file_name(device_class)] = spec
    unsafe = (f"{path} is left out: {fault}" for path, fault in sorted(host.faults.items()))
    return Built(specs, trouble, missing, (*files.complaints, *unsafe))


def _units(gpu: Gpu, host: HostDevices) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], list[str]]]:
    """Yield for a GPU and each of its MIG devices: its names, its required device nodes, and its optional device nodes."""
    whole = whole_gpu(gpu)
    by_path = f"/dev/dri/by-path/pci-{short_bus_id(gpu.pci_bus_id)}-"  # udev's links to the DRM nodes of a PCI device
    drm = [*host.drm.get(gpu.pci_bus_id, ()), *sorted(path for path in host.nodes if path.startswith(by_path))]
    yield (gpu.uuid, whole.index), whole.nodes, drm
    for mig in gpu.mig_devices:
        part = mig_device(gpu, mig)
        known = whole.nodes and None not in (mig.gpu_instance_cap, mig.compute_instance_cap)
        nodes = part.nodes if known else ()
        has_graphics = "gfx" in mig.profile.partition("+")[2]  # for example 1g.24gb+gfx
        yield (mig.uuid, part.index), nodes, drm if has_graphics else []


def _why_missing(gpu: Gpu, gone: Sequence[str], faults: Mapping[str, str]) -> str:
    if not gone and gpu.minor is None:
        return "its minor number is not known: the driver could not describe it"
    if not gone:
        return "its capability nodes are not known: does /proc/driver/nvidia-caps/mig-minors exist here?"
    if gone[0] in faults:
        return f"containers must not be given its device node {gone[0]}: {faults[gone[0]]}"
    advice = "nvidia-modprobe -c and -u make the device nodes of GPUs"
    if "/nvidia-caps/" in gone[0]:
        advice = "nvidia-modprobe -f makes it from the file of the same instance under /proc/driver/nvidia/capabilities"
    return f"its device node {gone[0]} does not exist on this node ({advice})"


def _common(nodes: Nodes, files: DriverFiles, options: CdiOptions) -> Edits:
    root = options.driver_root
    control = tuple(nodes.of(path) for path in nodes.there(CONTROL_NODES))
    left_out = (driver.STORAGE, driver.SOCKET) if NO_SOCKETS in options.feature_flags else (driver.STORAGE,)
    placed = [file for file in files.files if file.group not in left_out]
    as_socket = {driver.SOCKET: SOCKET_OPTIONS}
    mounts = [bind(root, file.target, file.container_path, as_socket.get(file.group, READ_ONLY)) for file in placed]
    if not options.hook:
        bound = loadable(root, files.libraries, files.machine).values()
        return Edits(env=(HIDDEN,), device_nodes=control, mounts=(*bound, *mounts))
    targets = [each.target for each in files.libraries]
    made_hooks = toolkit_hooks(
        options.hook, options.disabled_hooks, soname_links(files.libraries), targets, files.version
    )
    libcuda = next((each.target for each in files.libraries if "libcuda.so.1" in each.names), "/usr/lib64/libcuda.so.1")
    environment = (
        f"NVIDIA_CTK_LIBCUDA_DIR={dirname(libcuda)}",
        HIDDEN,
    )  # the hooks need libcuda's directory in containers
    mounts = [*(bind(root, target, target) for target in dict.fromkeys(targets)), *mounts]
    return Edits(env=environment, device_nodes=control, hooks=made_hooks, mounts=tuple(mounts))


def bind(root: str, target: str, container_path: str, options: tuple[str, ...] = READ_ONLY) -> Mount:
    """Return a mount of the file at `target` below the driver root, with the root's path on the host."""
    return Mount(host_path=f"{root}{target}", container_path=container_path, options=options)


def loadable(root: str, libraries: Sequence[Library], machine: str) -> dict[str, Mount]:
    """Return mounts of libraries by their container paths: each library in the loader's directories, under each of its names."""
    paths = [
        (f"{directory}/{name}", library)
        for directory in driver.loader_directories(machine)
        for library in libraries
        for name in library.names
    ]
    return {path: bind(root, library.target, path) for path, library in paths}


def toolkit_hooks(
    path: str, disabled: Iterable[str], links: Iterable[str], libraries: Iterable[str], version: str = ""
) -> tuple[Hook, ...]:
    """Return the hooks that make mounted libraries usable, without `disabled` hooks and without hooks that have no arguments.

    Args:
        path: the program on the host: nvidia-ctk, or nvidia-cdi-hook, which has no subcommand hook.
        disabled: the names of hooks to leave out; ALL_HOOKS for all.
        links: the links to make in a container, as `target::path`.
        libraries: the libraries whose directories are added to the dynamic loader's cache.
        version: the driver's version; empty if the driver has neither libraries for CUDA's compatibility nor nodes /dev/nvidiaN.
    """
    off = set(disabled)
    if ALL_HOOKS in off:
        return ()
    arguments = {
        "create-symlinks": _flagged("--link", links),
        "enable-cuda-compat": [f"--host-driver-version={version}"] if version else [],
        "update-ldcache": _flagged("--folder", dict.fromkeys(map(dirname, libraries))),
    }
    wanted = {name: more for name, more in arguments.items() if more}
    if version:
        wanted |= {"disable-device-node-modification": [], "update-application-profile": []}
    program = path.rpartition("/")[2]
    begin = [program, "hook"] if program == "nvidia-ctk" else [program]
    return tuple(
        Hook(hook_name="createContainer", path=path, args=(*begin, name, *more))
        for name, more in wanted.items()
        if name not in off
    )


def soname_links(libraries: Iterable[Library]) -> list[str]:
    """Return a link, as `target::path`, for each name of a library that is not its file's name."""
    links = []
    for library in libraries:
        # A library in gbm/ is found only by its path, which is a link if the file has another name.
        if any(name.startswith("gbm/") for name in library.names):
            if library.path != library.target:
                links.append(f"{library.target}::{library.path}")
            continue
        directory, file = dirname(library.target), library.target.rpartition("/")[2]
        before = file
        for name in (each.rpartition("/")[2] for each in library.names):
            if name != file:
                links.append(f"{before}::{directory}/{name}")
                before = name
    return links


def _flagged(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _others(nodes: Nodes, files: DriverFiles, options: CdiOptions) -> Iterator[tuple[str, Spec]]:
    channels = [channel for channel in options.imex_channels if imex_node(channel) in nodes.host.nodes]
    if channels:
        paths_by_name = {str(channel): [imex_node(channel)] for channel in channels}
        paths_by_name[cdi_names.ALL] = [imex_node(channel) for channel in channels]
        devices = [SpecDevice(name=name, container_edits=nodes.edits(paths)) for name, paths in paths_by_name.items()]
        yield cdi_names.IMEX, made(cdi_names.kind(cdi_names.IMEX), tuple(devices), Edits(env=(HIDDEN,)))
    for device_class in options.classes:
        beginnings = cdi_names.CLASS_NODES[device_class]
        paths = sorted(path for path in nodes.host.nodes if path.startswith(beginnings))
        if paths:
            storage = [file for file in files.files if file.group == driver.STORAGE and device_class == cdi_names.GDS]
            mounts = tuple(bind(options.driver_root, file.target, file.container_path) for file in storage)
            device = SpecDevice(name=cdi_names.ALL, container_edits=nodes.edits(paths))
            yield device_class, made(cdi_names.kind(device_class), (device,), Edits(env=(HIDDEN,), mounts=mounts))
