import pytest
from msgspec.structs import replace

from gpu_plugin.containers.cdi.build import READ_ONLY
from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices, Kind, Seen, SeenLibrary
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.spec import DeviceNode, from_json
from gpu_plugin.containers.cdi.written import encoded
from gpu_plugin.containers.driver_root import wsl
from gpu_plugin.containers.driver_root.wsl import Store, WslFiles, choose, pick, wsl_specs

STORE = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_0373d825005116d0"
HOST = HostDevices({"/dev/dxg": DeviceFile(10, 125)})
LIB, MULTIARCH = "/usr/lib64", "/usr/lib/x86_64-linux-gnu"


def library(path, soname="", machine="EM_X86_64", fault=""):
    return SeenLibrary(Seen(path, Kind.FILE, path), soname or path.rpartition("/")[2], machine, fault=fault)


def seen(path, kind=Kind.FILE):
    return Seen(path, kind, path if kind is Kind.FILE else "")


DXCORE = library("/usr/lib/wsl/lib/libdxcore.so")
FILES = WslFiles(
    DXCORE,
    (
        library(f"{STORE}/libcuda.so.1.1", "libcuda.so.1"),
        library(f"{STORE}/libcuda_loader.so", "libcuda.so.1"),
        library(f"{STORE}/libnvidia-ptxjitcompiler.so.1"),
        library(f"{STORE}/libnvidia-ml.so.1"),
        library(f"{STORE}/libnvidia-ml_loader.so", "libnvidia-ml.so.1"),
        library(f"{STORE}/libnvdxgdmal.so.1"),
    ),
    (seen(f"{STORE}/nvcubins.bin"), seen(f"{STORE}/nvidia-smi")),
)
OWN = [each.seen.path for each in (*FILES.libraries, DXCORE)] + [each.path for each in FILES.files]


def spec_of(files=FILES, host=HOST, **options):
    built = wsl_specs(files, host, CdiOptions(**options))
    assert built.trouble == ""
    assert list(built.specs) == ["k8s.device-plugin.nvidia.com-gpu.json"]
    (spec,) = built.specs.values()
    assert from_json(encoded(spec)) == spec
    return spec


def mounted(spec):
    return {mount.container_path: mount.host_path for mount in spec.container_edits.mounts}


def without(name):
    return replace(FILES, libraries=tuple(each for each in FILES.libraries if not each.seen.path.endswith(f"/{name}")))


def test_the_one_device_has_two_names_and_the_node():
    spec = spec_of()
    assert (spec.kind, spec.cdi_version) == ("k8s.device-plugin.nvidia.com/gpu", "0.5.0")
    node = DeviceNode(path="/dev/dxg", type="c", major=10, minor=125, file_mode=0o666, permissions="rw")
    assert {device.name: device.container_edits.device_nodes for device in spec.devices} == {
        "all": (node,), "0": (node,),
    }  # fmt: skip
    assert spec.container_edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)
    assert spec.container_edits.hooks == ()
    assert {mount.options for mount in spec.container_edits.mounts} == {READ_ONLY}


def test_every_file_keeps_its_path_and_libraries_are_where_the_loader_looks():
    names = {
        "libcuda.so.1": f"{STORE}/libcuda_loader.so",
        "libcuda.so": f"{STORE}/libcuda_loader.so",
        "libnvidia-ml.so.1": f"{STORE}/libnvidia-ml_loader.so",
        "libnvidia-ptxjitcompiler.so.1": f"{STORE}/libnvidia-ptxjitcompiler.so.1",
        "libnvdxgdmal.so.1": f"{STORE}/libnvdxgdmal.so.1",
        "libdxcore.so": "/usr/lib/wsl/lib/libdxcore.so",
    }
    placed = {f"{directory}/{name}": path for directory in (LIB, MULTIARCH) for name, path in names.items()}
    assert mounted(spec_of()) == {
        **{path: path for path in OWN},
        **placed,
        "/usr/bin/nvidia-smi": f"{STORE}/nvidia-smi",
    }


def test_roots_are_as_the_host_calls_them():
    spec = spec_of(driver_root="/mnt/root", dev_root="/mnt/dev")
    assert all(path.startswith("/mnt/root/usr/lib/wsl/") for path in mounted(spec).values())
    assert {node.host_path for device in spec.devices for node in device.container_edits.device_nodes} == {
        "/mnt/dev/dev/dxg"
    }


@pytest.mark.parametrize(
    ("hook", "begin"),
    [
        ("/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook")),
        ("/usr/local/nvidia/toolkit/nvidia-cdi-hook", ("nvidia-cdi-hook",)),
    ],
)
def test_with_nvidias_hook_files_keep_their_paths_and_the_hook_does_the_rest(hook, begin):
    spec = spec_of(hook=hook)
    assert list(mounted(spec).values()) == list(mounted(spec)) == OWN
    links, cache = spec.container_edits.hooks
    assert links.path == cache.path == hook
    assert links.args == (
        *begin, "create-symlinks",
        "--link", f"libcuda_loader.so::{STORE}/libcuda.so.1",
        "--link", f"libcuda.so.1::{STORE}/libcuda.so",
        "--link", f"{STORE}/nvidia-smi::/usr/bin/nvidia-smi",
    )  # fmt: skip
    assert cache.args == (*begin, "update-ldcache", "--folder", STORE, "--folder", "/usr/lib/wsl/lib")


def test_a_driver_without_loaders_goes_under_its_own_names():
    old = replace(FILES, libraries=tuple(each for each in FILES.libraries if not each.seen.path.endswith("_loader.so")))
    found = mounted(spec_of(old))
    assert found[f"{LIB}/libcuda.so.1"] == found[f"{LIB}/libcuda.so"] == f"{STORE}/libcuda.so.1.1"
    assert found[f"{MULTIARCH}/libnvidia-ml.so.1"] == f"{STORE}/libnvidia-ml.so.1"


def test_without_nvidia_smi_nothing_stands_for_it():
    bare = replace(FILES, files=FILES.files[:1])
    assert "/usr/bin/nvidia-smi" not in mounted(spec_of(bare))
    links = spec_of(bare, hook="/usr/bin/nvidia-ctk").container_edits.hooks[0].args
    assert not any("nvidia-smi" in word for word in links)


@pytest.mark.parametrize(
    ("files", "host", "why"),
    [
        (FILES, HostDevices(searched=("/mnt",)), "there is no device /dev/dxg under /mnt"),
        (replace(FILES, fault="no store"), HOST, "no store"),
        (replace(FILES, fault="no store"), HostDevices(), "no store"),
        (replace(FILES, dxcore=None), HOST, "the driver root / has no libdxcore.so that programs can load"),
        (without("libcuda.so.1.1"), HOST, "the driver root / has no libcuda.so.1.1 that programs can load"),
        (WslFiles(DXCORE), HOST, "no libcuda.so.1.1 that programs can load"),
        (replace(FILES, dxcore=library("/usr/lib/wsl/lib/libdxcore.so", machine="EM_AARCH64")), HOST, "no libdxcore.so"),
    ],
)  # fmt: skip
def test_what_no_container_could_use_is_no_specification(files, host, why):
    built = wsl_specs(files, host, CdiOptions(dev_root="/mnt"))
    assert why in built.trouble
    assert built.specs == {}


def test_single_files_that_are_no_good_are_left_out_and_said():
    bad = library(f"{STORE}/libnvbad.so", fault="it is damaged")
    foreign = library(f"{STORE}/libnvarm.so", machine="EM_AARCH64")
    files = replace(
        FILES,
        libraries=(*FILES.libraries, bad, foreign),
        files=(*FILES.files, seen(f"{STORE}/nvoptix.bin", Kind.MISSING)),
        complaints=("two drivers",),
    )
    built = wsl_specs(files, HOST, CdiOptions())
    assert built.complaints == (
        "two drivers",
        f"{STORE}/libnvbad.so in the driver root / is left out: it is damaged",
        f"{STORE}/nvoptix.bin is left out: it is not a regular file (missing)",
    )
    assert not {f"{STORE}/libnvbad.so", f"{STORE}/libnvarm.so", f"{STORE}/nvoptix.bin"} & set(mounted(spec_of(files)))


def test_the_store_in_use_goes_before_the_newest_and_the_choice_is_the_same_every_time():
    stores = [Store(f"{wsl.STORE}/nv{name}", (wsl.CUDA,), current, written) for name, current, written in
              (("a", False, 9), ("b", True, 1), ("c", True, 1), ("d", False, 9))]  # fmt: skip
    assert choose(stores, "/")[0].directory.endswith("nvc")
    assert choose(stores[::-1], "/")[0].directory.endswith("nvc")
    assert choose([stores[3], stores[0]], "/")[0].directory.endswith("nvd")
    assert choose(stores[:1], "/") == (stores[0], ())


def test_a_store_with_more_libraries_than_any_driver_is_cut_short():
    names = tuple(f"libnv{number}.so" for number in range(600))
    libraries, _, complaints = pick(Store(f"{wsl.STORE}/nva", (*wsl.EXPECTED, *names)), "/")
    assert len(libraries) == 512
    assert libraries[0].endswith("/libcuda.so.1.1")
    assert complaints == [f"/{wsl.STORE}/nva has 606 libraries; containers get the first 512"]


def test_what_a_store_lacks_is_said_at_once():
    _, _, (complaint,) = pick(Store(f"{wsl.STORE}/nva", (wsl.CUDA,)), "/mnt")
    assert complaint.startswith(f"/{wsl.STORE}/nva in the driver root /mnt has no libcuda_loader.so, libnvidia-ptx")
    assert complaint.endswith("nvcubins.bin, nvidia-smi")
