"""The CDI specification of a WSL node: all NVIDIA GPUs of the Windows host as one device, with the host driver's own files.

The files and their paths in containers are the same as from NVIDIA's toolkit (nvidia-container-toolkit, pkg/nvcdi/driver-wsl.go).
The files keep their paths, since the driver's loader asks Windows for the driver store and opens them there.
"""

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi import driver, hooks
from gpu_plugin.containers.cdi.build import HIDDEN, Built, Nodes, bind, gpu_spec, loadable
from gpu_plugin.containers.cdi.directories import DXCORE, WSL_LIBRARIES
from gpu_plugin.containers.cdi.host_files import HostDevices, Kind, Library, Seen, SeenLibrary
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.spec import Edits, SpecDevice
from gpu_plugin.devices.device import WSL_GPUS

DXG = "/dev/dxg"  # the device through which Linux reaches the Windows host's GPUs

# The driver store of Windows. Each driver has a directory there, named after its INF file.
STORE = "usr/lib/wsl/drivers"

CUDA = "libcuda.so.1.1"
CUDA_LOADER = "libcuda_loader.so"
NVIDIA_SMI = "nvidia-smi"

EXPECTED = (
    CUDA,
    CUDA_LOADER,
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so",
    "libnvdxgdmal.so.1",
    "nvcubins.bin",
    NVIDIA_SMI,
)
"""The Linux files of NVIDIA's driver for Windows, as nvcdi lists them. Containers also get further libraries and data files."""

_OF_NVIDIA = re.compile(r"nv[^/]*\.inf_[^/]+", re.IGNORECASE)
_LIBRARY = re.compile(r".+\.so(\..+)?")
_LOADER = re.compile(r".+_loader\.so(\..+)?")


class Store(msgspec.Struct, frozen=True):
    """One of NVIDIA's drivers in the driver store."""

    directory: str  # such as usr/lib/wsl/drivers/nv_dispi.inf_amd64_1f
    names: tuple[str, ...]  # the names of the files in the directory
    current: bool = False  # whether the loader of CUDA in WSL's own directory is this driver's
    written: int = 0  # the time at which its libcuda was written, in ns


class WslFiles(msgspec.Struct, frozen=True):
    """The files of a WSL node for containers: libdxcore, and the libraries and other files of one driver in the driver store."""

    dxcore: SeenLibrary | None = None
    libraries: tuple[SeenLibrary, ...] = ()
    files: tuple[Seen, ...] = ()
    complaints: tuple[str, ...] = ()  # sentences about files that are left out
    fault: str = ""  # why no container can use a GPU; empty if containers can


def of_nvidia(directories: Iterable[str]) -> list[str]:
    """Return the directories of the driver store that may have NVIDIA's display driver: names of its INF files begin with nv."""
    return [f"{STORE}/{name}" for name in directories if _OF_NVIDIA.fullmatch(name)]


def choose(stores: Sequence[Store], root: str) -> tuple[Store, tuple[str, ...]]:
    """Return the driver for containers, and a sentence if there are several drivers.

    Windows keeps former drivers in its store, and copies the loader of the driver in use to WSL's own directory. So the driver
    with the same loader is in use. If WSL's directory does not exist, for example in a node that is a container, the driver that
    was written last is probably in use.

    Args:
        stores: the drivers that have CUDA for Linux; at least one.
        root: the operator's path of the driver root, for sentences.
    """
    best = max(stores, key=attrgetter("current", "written", "directory"))
    if len(stores) == 1:
        return best, ()
    why = (
        f"since its {CUDA_LOADER} is also in /{WSL_LIBRARIES}"
        if best.current
        else f"which was written last, since /{WSL_LIBRARIES} has no {CUDA_LOADER} of these drivers"
    )
    there = ", ".join(sorted(store.directory.rpartition("/")[2] for store in stores))
    sentence = f"/{STORE} in the driver root {root} has several NVIDIA drivers, {there}; containers get /{best.directory}, {why}"
    return best, (sentence,)


def pick(store: Store, root: str) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Return the paths of a driver's libraries and of its other files, and a sentence about missing files."""
    more = [name for name in store.names if _LIBRARY.fullmatch(name) or name.endswith(".bin")]
    others = [name for name in more if name not in EXPECTED]
    wanted = [*(name for name in EXPECTED if name in store.names), *others]
    libraries = [f"/{store.directory}/{name}" for name in wanted if _LIBRARY.fullmatch(name)]
    files = [f"/{store.directory}/{name}" for name in wanted if not _LIBRARY.fullmatch(name)]
    lacking = [name for name in EXPECTED if name not in store.names]
    complaints = (f"/{store.directory} in the driver root {root} has no {', '.join(lacking)}",) if lacking else ()
    if len(libraries) > driver.MAX_LIBRARIES:
        too_many = f"/{store.directory} has {len(libraries)} libraries; containers get the first {driver.MAX_LIBRARIES}"
        complaints = (*complaints, too_many)
    return libraries[: driver.MAX_LIBRARIES], files[: driver.MAX_LIBRARIES], complaints


def no_driver(root: str) -> str:
    """Say why no container can use a GPU if the root's driver store has no driver for Linux."""
    return (
        f"the driver root {root} has no {CUDA} in a directory /{STORE}/nv*.inf_*: install NVIDIA's driver on the Windows "
        "host, and make sure that /usr/lib/wsl of the WSL distribution is below that root"
    )


def wsl_specs(files: WslFiles, host: HostDevices, options: CdiOptions) -> Built:
    """Build the specification of the single device, under the names `all` and `0`, with the files below the driver root."""
    root = options.driver_root
    libraries, machine, complaints, fault = _libraries(files, root or "/")
    others = [seen for seen in files.files if not seen.fault and seen.kind is Kind.FILE]
    complaints += [
        f"{seen.path} is left out: {seen.fault or f'it is not a regular file ({seen.kind})'}"
        for seen in files.files
        if seen not in others
    ]
    complaints = [*files.complaints, *complaints]
    trouble = files.fault or fault
    if not trouble and DXG not in host.nodes:
        places = " or ".join(host.searched)
        trouble = f"there is no device {DXG} under {places}: WSL makes it if Windows has a GPU driver for it"
    if trouble:
        return Built(trouble=trouble, complaints=tuple(complaints))
    mounts = {library.path: bind(root, library.target, library.path) for library in libraries}
    mounts |= {seen.path: bind(root, seen.target, seen.path) for seen in others}
    smi = next((seen for seen in others if seen.path.endswith(f"/{NVIDIA_SMI}")), None)
    if options.hook:
        links = [link for link in hooks.soname_links(libraries) if link.partition("::")[2] not in mounts]
        links += [f"{smi.path}::/usr/bin/{NVIDIA_SMI}"] if smi else []
        made = hooks.hooks(options.hook, options.disabled_hooks, links, [library.path for library in libraries])
        common = Edits(env=(HIDDEN,), hooks=made, mounts=tuple(mounts.values()))
    else:
        placed = loadable(root, libraries, machine)
        if smi:
            placed[f"/usr/bin/{NVIDIA_SMI}"] = bind(root, smi.target, f"/usr/bin/{NVIDIA_SMI}")
        common = Edits(env=(HIDDEN,), mounts=tuple({**placed, **mounts}.values()))
    node = Nodes(host, options).edits([DXG])
    devices = tuple(SpecDevice(name=name, container_edits=node) for name in (WSL_GPUS, cdi_names.INDEX))
    return Built(gpu_spec(devices, common), complaints=tuple(complaints))


def _libraries(files: WslFiles, root: str) -> tuple[list[Library], str, list[str], str]:
    """Return the libraries for containers, their processor, sentences about libraries that are left out, and the fault.

    The fault says which required library is missing; it is empty if no library is missing. The loader of the driver has the same
    SONAME as the driver, and gets that name. Windows does the same: it copies libcuda_loader.so to WSL's directory as
    libcuda.so.1 (`CopyToVmWhenNewer` in NVIDIA's INF files).
    """
    seen = [*files.libraries, *([files.dxcore] if files.dxcore else [])]
    complaints = [
        f"{each.seen.path} in the driver root {root} is left out: {each.fault}" for each in seen if each.fault
    ]
    machine = next((each.machine for each in seen if _file(each) == CUDA and not each.fault), "")
    good = [each for each in seen if not each.fault and (each.machine, each.bits) == (machine, 64)]
    loader_first = sorted(good, key=lambda each: _LOADER.fullmatch(_file(each)) is None)
    named = {library.path: library for library in driver.named_once(loader_first)}
    fault = ""
    for name in (CUDA, DXCORE):
        if not any(_file(each) == name for each in good):
            fault = f"the driver root {root} has no {name} that programs can load"
            fault += next((f": {line}" for line in complaints if f"/{name} " in line), "")
            break
    return [named[each.seen.path] for each in good], machine, complaints, fault


def _file(each: SeenLibrary) -> str:
    return each.seen.path.rpartition("/")[2]
