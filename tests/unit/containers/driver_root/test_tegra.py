import pytest
from msgspec.structs import replace

from gpu_plugin.containers.cdi.build import READ_ONLY
from gpu_plugin.containers.cdi.host_files import DeviceFile, Kind, Seen, SeenLibrary
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.spec import from_json
from gpu_plugin.containers.cdi.written import encoded
from gpu_plugin.containers.driver_root.tegra import Entry, Line, Looked, TegraFiles, is_library, tegra_specs

MULTIARCH = "/usr/lib/aarch64-linux-gnu"
NVIDIA = f"{MULTIARCH}/nvidia"


def device(path, kind=Kind.DEVICE):
    return Looked(Line(Entry.DEVICE, path), Seen(path, kind, path))


def entry(kind, path, target=None, found=Kind.FILE, link=False, soname=None, fault="", machine="EM_AARCH64", bits=64):
    """A line and its file; the file is a library if there is a SONAME or a fault."""
    seen = Seen(path, found, (target or path) if found is not Kind.MISSING else "", link=link)
    library = SeenLibrary(seen, soname or "", machine, bits, fault) if soname is not None or fault else None
    return Looked(Line(kind, path), seen, library)


LIBCUDA = entry(Entry.LIBRARY, f"{NVIDIA}/libcuda.so.1.1", soname="libcuda.so.1")
FILES = TegraFiles(
    (
        device("/dev/nvmap"),
        device("/dev/nvhost-gpu"),
        LIBCUDA,
        entry(Entry.LIBRARY, f"{NVIDIA}/libnvos.so", soname="libnvos.so"),
        entry(Entry.LIBRARY, "/lib/firmware/tegra23x/nvdec.bin", "/usr/lib/firmware/tegra23x/nvdec.bin"),
        entry(Entry.DIRECTORY, "/usr/share/drirc.d", found=Kind.DIRECTORY),
        entry(Entry.LINK, f"{MULTIARCH}/libcuda.so", f"{NVIDIA}/libcuda.so.1.1", link=True, soname="libcuda.so.1"),
        entry(Entry.LINK, "/usr/share/glvnd/egl_vendor.d/10_nvidia.json", f"{NVIDIA}/nvidia.json", link=True),
        entry(Entry.LINK, f"{NVIDIA}/libcuda.so.1.1", soname="libcuda.so.1"),
    ),
    {"/dev/nvmap": DeviceFile(10, 124, 0o660, 44), "/dev/nvhost-gpu": DeviceFile(487, 1, 0o660, 44)},
)


def spec_of(files=FILES, **options):
    built = tegra_specs(files, CdiOptions(**options))
    assert built.trouble == ""
    assert list(built.specs) == ["k8s.device-plugin.nvidia.com-gpu.json"]
    (spec,) = built.specs.values()
    assert from_json(encoded(spec)) == spec
    return spec


def mounted(spec):
    paths = [mount.container_path for mount in spec.container_edits.mounts]
    assert len(set(paths)) == len(paths)
    assert {mount.options for mount in spec.container_edits.mounts} == {READ_ONLY}
    return {mount.container_path: mount.host_path for mount in spec.container_edits.mounts}


def with_(*more, **changed):
    return replace(FILES, looked=(*FILES.looked, *more), **changed)


def test_the_one_device_goes_by_either_id_strategy_and_has_the_listed_nodes():
    spec = spec_of(dev_root="/mnt")
    assert [device.name for device in spec.devices] == ["tegra", "0", "all"]
    assert len({device.container_edits for device in spec.devices}) == 1
    edits = spec.devices[0].container_edits
    assert [(node.path, node.host_path, node.type, node.major, node.minor, node.file_mode) for node in edits.device_nodes] == [
        ("/dev/nvmap", "/mnt/dev/nvmap", "c", 10, 124, 0o660),
        ("/dev/nvhost-gpu", "/mnt/dev/nvhost-gpu", "c", 487, 1, 0o660),
    ]  # fmt: skip
    assert edits.additional_gids == (44,)
    off = spec_of(feature_flags=frozenset({"no-additional-gids-for-device-nodes"}))
    assert off.devices[0].container_edits.additional_gids == ()
    assert spec.container_edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)


def test_a_block_device_is_one():
    files = with_(device("/dev/nvblock"), nodes={**FILES.nodes, "/dev/nvblock": DeviceFile(259, 0, type="b")})
    node = spec_of(files).devices[0].container_edits.device_nodes[-1]
    assert (node.path, node.type) == ("/dev/nvblock", "b")


def test_without_hooks_links_are_what_they_lead_to_and_libraries_where_the_loader_looks():
    spec = spec_of(driver_root="/mnt")
    own = {
        f"{NVIDIA}/libcuda.so.1.1": f"{NVIDIA}/libcuda.so.1.1",
        f"{NVIDIA}/libnvos.so": f"{NVIDIA}/libnvos.so",
        "/lib/firmware/tegra23x/nvdec.bin": "/usr/lib/firmware/tegra23x/nvdec.bin",
        "/usr/share/drirc.d": "/usr/share/drirc.d",
        f"{MULTIARCH}/libcuda.so": f"{NVIDIA}/libcuda.so.1.1",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json": f"{NVIDIA}/nvidia.json",
    }
    placed = {
        f"{directory}/{name}": f"{NVIDIA}/{file}"
        for directory in ("/usr/lib64", MULTIARCH)
        for name, file in (("libcuda.so.1", "libcuda.so.1.1"), ("libcuda.so", "libcuda.so.1.1"), ("libnvos.so", "libnvos.so"))
    }  # fmt: skip
    assert mounted(spec) == {path: f"/mnt{target}" for path, target in {**own, **placed}.items()}
    assert spec.container_edits.hooks == ()


def test_with_nvidias_hook_files_are_where_links_lead_and_the_hook_makes_the_links():
    spec = spec_of(hook="/usr/bin/nvidia-cdi-hook", driver_root="/mnt")
    assert list(mounted(spec).items()) == [
        (f"{NVIDIA}/libcuda.so.1.1", f"/mnt{NVIDIA}/libcuda.so.1.1"),
        (f"{NVIDIA}/nvidia.json", f"/mnt{NVIDIA}/nvidia.json"),
        (f"{NVIDIA}/libnvos.so", f"/mnt{NVIDIA}/libnvos.so"),
        ("/lib/firmware/tegra23x/nvdec.bin", "/mnt/usr/lib/firmware/tegra23x/nvdec.bin"),
        ("/usr/share/drirc.d", "/mnt/usr/share/drirc.d"),
    ]
    links, cache = spec.container_edits.hooks
    assert links.args == (
        "nvidia-cdi-hook", "create-symlinks",
        "--link", f"{NVIDIA}/libcuda.so.1.1::{MULTIARCH}/libcuda.so",
        "--link", f"{NVIDIA}/nvidia.json::/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "--link", f"libcuda.so.1.1::{NVIDIA}/libcuda.so.1",
        "--link", f"libcuda.so.1::{NVIDIA}/libcuda.so",
    )  # fmt: skip
    assert cache.args == ("nvidia-cdi-hook", "update-ldcache", "--folder", NVIDIA)
    assert spec_of(hook="/usr/bin/nvidia-ctk", disabled_hooks=frozenset({"all"})).container_edits.hooks == ()


def test_no_link_is_made_over_a_file_and_those_that_are_listed_go_before_others():
    files = with_(
        entry(Entry.LIBRARY, f"{NVIDIA}/libnvx.so.2", soname="libnvx.so"),
        entry(Entry.LIBRARY, f"{NVIDIA}/libnvx.so", soname="libnvx.so"),
        entry(Entry.LINK, f"{NVIDIA}/libcuda.so.1", f"{NVIDIA}/libcuda.so.1.1", link=True, soname="libcuda.so.1"),
    )
    args = spec_of(files, hook="/usr/bin/nvidia-ctk").container_edits.hooks[0].args
    assert [word for word in args if word.endswith(("/libnvx.so", f"{NVIDIA}/libcuda.so.1"))] == [
        f"{NVIDIA}/libcuda.so.1.1::{NVIDIA}/libcuda.so.1"
    ]


def test_what_a_list_says_of_a_path_goes_before_a_library_of_that_name():
    files = with_(entry(Entry.LINK, f"{MULTIARCH}/libnvos.so", "/opt/libnvos.so", link=True))
    found = mounted(spec_of(files))
    assert found[f"{MULTIARCH}/libnvos.so"] == "/opt/libnvos.so"
    assert found["/usr/lib64/libnvos.so"] == f"{NVIDIA}/libnvos.so"


def test_what_is_not_there_is_left_out_and_counted():
    files = with_(
        device("/dev/absent", Kind.MISSING),
        entry(Entry.LIBRARY, "/usr/lib/absent.so", found=Kind.MISSING),
        entry(Entry.DIRECTORY, "/usr/lib/file", found=Kind.FILE),
        entry(Entry.LINK, "/usr/lib/socket", found=Kind.SOCKET),
        complaints=("a line is wrong",),
    )
    wrong, left_out = tegra_specs(files, CdiOptions()).complaints
    assert wrong == "a line is wrong"
    assert left_out.startswith("4 of 13 paths in the lists of Linux for Tegra are left out, since they do not exist")
    assert left_out.endswith(": /usr/lib/absent.so, /usr/lib/file, /usr/lib/socket, ...")
    assert spec_of(files) == spec_of()
    assert tegra_specs(FILES, CdiOptions()).complaints == ()


def test_a_link_to_a_directory_is_that_directory():
    files = with_(entry(Entry.LINK, "/usr/lib/now", "/usr/lib/then", found=Kind.DIRECTORY, link=True))
    assert mounted(spec_of(files))["/usr/lib/now"] == "/usr/lib/then"


def test_a_file_named_as_a_library_that_is_none_keeps_its_path_alone():
    files = with_(entry(Entry.LIBRARY, f"{NVIDIA}/libscript.so", fault="it is not an ELF file (x)"))
    built = tegra_specs(files, CdiOptions())
    assert built.complaints == (
        f"{NVIDIA}/libscript.so is mounted in containers only at that path: it is not an ELF file (x)",
    )
    assert [path for path in mounted(spec_of(files)) if "libscript" in path] == [f"{NVIDIA}/libscript.so"]


def test_libraries_of_one_soname_or_for_other_programs_do_not_take_the_place_of_libcuda():
    files = replace(FILES, looked=(
        entry(Entry.LIBRARY, "/usr/lib/arm/libnv32.so", soname="libnv32.so", machine="EM_ARM", bits=32),
        entry(Entry.LIBRARY, "/usr/lib/x86/libnvx.so", soname="libnvx.so", machine="EM_X86_64"),
        *FILES.looked,
        entry(Entry.LIBRARY, f"{MULTIARCH}/tegra/libcuda.so.1.1", soname="libcuda.so.1"),
    ))  # fmt: skip
    found = mounted(spec_of(files))
    assert found[f"{MULTIARCH}/libcuda.so.1"] == f"{NVIDIA}/libcuda.so.1.1"
    for path in ("/usr/lib/arm/libnv32.so", "/usr/lib/x86/libnvx.so", f"{MULTIARCH}/tegra/libcuda.so.1.1"):
        assert found[path] == path
    assert not {f"{MULTIARCH}/libnv32.so", f"{MULTIARCH}/libnvx.so"} & set(found)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (TegraFiles(fault="no lists"), "no lists"),
        (
            replace(FILES, nodes={}, searched=("/mnt",)),
            "no device node that the lists of Linux for Tegra name exists under /mnt",
        ),
        (replace(FILES, looked=(LIBCUDA,)), "no device node"),
    ],
)
def test_without_lists_or_nodes_there_is_no_specification(files, why):
    built = tegra_specs(files, CdiOptions(dev_root="/mnt"))
    assert why in built.trouble
    assert built.specs == {}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/libcuda.so", True),
        ("/a/libcuda.so.1.1", True),
        ("/a/nvidia-drm_gbm.so", False),
        ("/a/libcuda.socket", False),
        ("/a/lib.so", False),
        ("/lib/x.so", False),
    ],
)
def test_libraries_are_told_by_their_names(path, expected):
    assert is_library(path) is expected
