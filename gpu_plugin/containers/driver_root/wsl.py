"""The CDI specification of a WSL node: all NVIDIA GPUs of the Windows host as one device, with the host driver's own files.

The files and their paths in containers are the same as from NVIDIA's toolkit (nvidia-container-toolkit, pkg/nvcdi/driver-wsl.go).
The files keep their paths, since the driver's loader asks Windows for the driver store and opens them there.
"""

import filecmp
import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import msgspec

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi import driver
from gpu_plugin.containers.cdi.build import HIDDEN, Built, Nodes, bind, gpu_spec, loadable, soname_links, toolkit_hooks
from gpu_plugin.containers.cdi.host_files import (
    DXCORE,
    DXCORE_DIRECTORIES,
    WSL_LIBRARIES,
    HostDevices,
    Kind,
    Library,
    Seen,
    SeenLibrary,
)
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.spec import Edits, SpecDevice
from gpu_plugin.containers.driver_root.tree import FirstRoot, Tree
from gpu_plugin.devices.device import WSL_GPUS
from gpu_plugin.devices.node import Gpu

DXG = "/dev/dxg"  # the device through which Linux reaches the Windows host's GPUs

# The driver store of Windows. Each driver has a directory there, named after its INF file.
STORE = "usr/lib/wsl/drivers"

CUDA = "libcuda.so.1.1"
CUDA_LOADER = "libcuda_loader.so"
NVIDIA_SMI = "nvidia-smi"

# The Linux files of NVIDIA's driver for Windows, as nvcdi lists them. Containers also get further libraries and data files.
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

_LOADED_AS = ("libcuda.so.1", "libcuda.so.1.1")  # the names of the loader of CUDA in WSL's own directory
_OF_NVIDIA = re.compile(r"nv[^/]*\.inf_[^/]+", re.IGNORECASE)  # the INF files of NVIDIA's display drivers begin with nv
_LIBRARY = re.compile(r".+\.so(\..+)?")
_LOADER = re.compile(r".+_loader\.so(\..+)?")


class Store(msgspec.Struct, frozen=True):
    """A driver of NVIDIA in the driver store."""

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


class WslSearch(FirstRoot[WslFiles]):
    """Finds the files for Linux of a Windows host's driver."""

    def _in(self, tree: Tree, root: str, running: str) -> tuple[WslFiles, bool]:
        del running
        dxcore = _dxcore(tree)
        drivers = tree.names([STORE]).get(STORE, ())
        listing = tree.names(f"{STORE}/{name}" for name in drivers if _OF_NVIDIA.fullmatch(name))
        stores = [_store(tree, directory, names) for directory, names in listing.items() if CUDA in names]
        if not stores:
            fault = (
                f"the driver root {root} has no {CUDA} in a directory /{STORE}/nv*.inf_*: install NVIDIA's driver on the Windows "
                "host, and make sure that /usr/lib/wsl of the WSL distribution is below that root"
            )
            return WslFiles(fault=fault), False
        store, complaints = choose(stores, root)
        libraries, files, lacking = pick(store, root)
        seen = tuple(map(tree.library, libraries)), tuple(map(tree.look, files))
        return WslFiles(dxcore, *seen, (*complaints, *lacking)), bool(libraries)

    def specs(self, files: WslFiles, gpus: Sequence[Gpu], host: HostDevices, options: CdiOptions) -> Built:
        """Build the specification of the single device."""
        del gpus
        return wsl_specs(files, host, options)


def _dxcore(tree: Tree) -> SeenLibrary | None:
    """Return the first libdxcore that can be loaded; if none can be loaded, the first libdxcore; None without a libdxcore."""
    there = [directory for directory, names in tree.names(DXCORE_DIRECTORIES).items() if DXCORE in names]
    libraries = [tree.library(f"/{directory}/{DXCORE}") for directory in there]
    return next((library for library in libraries if not library.fault), libraries[0] if libraries else None)


def _store(tree: Tree, directory: str, names: tuple[str, ...]) -> Store:
    cuda = tree.look(f"/{directory}/{CUDA}")
    try:
        written = Path(tree.root + cuda.target).stat().st_mtime_ns if cuda.kind is Kind.FILE else 0
    except OSError:
        written = 0  # removed just now
    return Store(directory, names, _current(tree, f"/{directory}/{CUDA_LOADER}"), written)


def _current(tree: Tree, loader: str) -> bool:
    """Whether this loader of CUDA equals the loader in WSL's own directory."""
    own = tree.look(loader)
    for name in _LOADED_AS:
        loaded = tree.look(f"/{WSL_LIBRARIES}/{name}")
        if own.kind is loaded.kind is Kind.FILE and not own.fault and not loaded.fault:
            try:
                return filecmp.cmp(tree.root + own.target, tree.root + loaded.target, shallow=False)
            except OSError:
                return False  # a file was removed just now
    return False


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


def pick(store: Store, root: str) -> tuple[list[str], list[str], list[str]]:
    """Return the paths of a driver's libraries and of its other files, and sentences about missing files and too many files."""
    more = [name for name in store.names if _LIBRARY.fullmatch(name) or name.endswith(".bin")]
    wanted = [name for name in EXPECTED if name in store.names]
    wanted += [name for name in more if name not in EXPECTED]
    libraries = [f"/{store.directory}/{name}" for name in wanted if _LIBRARY.fullmatch(name)]
    files = [f"/{store.directory}/{name}" for name in wanted if not _LIBRARY.fullmatch(name)]
    lacking = [name for name in EXPECTED if name not in store.names]
    complaints = []
    if lacking:
        complaints.append(f"/{store.directory} in the driver root {root} has no {', '.join(lacking)}")
    most = driver.MAX_LIBRARIES
    if len(libraries) > most:
        complaints.append(f"/{store.directory} has {len(libraries)} libraries; containers get the first {most}")
    return libraries[:most], files[:most], complaints


def wsl_specs(files: WslFiles, host: HostDevices, options: CdiOptions) -> Built:
    """Build the specification of the single device, under the names `all` and `0`, with the files below the driver root."""
    root = options.driver_root
    libraries, machine, left_out, trouble = _libraries(files, root or "/")
    others = [seen for seen in files.files if not seen.fault and seen.kind is Kind.FILE]
    complaints = [*files.complaints, *left_out]
    complaints += [
        f"{seen.path} is left out: {seen.fault or f'it is not a regular file ({seen.kind})'}"
        for seen in files.files
        if seen not in others
    ]
    trouble = files.fault or trouble
    if not trouble and DXG not in host.nodes:
        places = " or ".join(host.searched)
        trouble = f"there is no device {DXG} under {places}: WSL makes it if Windows has a GPU driver for it"
    if trouble:
        return Built(trouble=trouble, complaints=tuple(complaints))
    mounts = {library.path: bind(root, library.target, library.path) for library in libraries}
    mounts |= {seen.path: bind(root, seen.target, seen.path) for seen in others}
    smi = next((seen for seen in others if seen.path.endswith(f"/{NVIDIA_SMI}")), None)
    if options.hook:
        links = [link for link in soname_links(libraries) if link.partition("::")[2] not in mounts]
        links += [f"{smi.path}::/usr/bin/{NVIDIA_SMI}"] if smi else []
        made = toolkit_hooks(options.hook, options.disabled_hooks, links, [library.path for library in libraries])
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
