import random

import pytest

from gpu_plugin.containers.cdi import driver
from gpu_plugin.containers.cdi.host_files import DriverFiles, Kind, Listing, Seen, SeenLibrary

LIB64 = "usr/lib64"


def library(path: str, soname: str, machine: str = "EM_X86_64", bits: int = 64) -> SeenLibrary:
    return SeenLibrary(Seen(path, Kind.FILE, path), soname, machine, bits)


def chosen(*libraries: SeenLibrary) -> DriverFiles:
    return driver.chosen("550.1", libraries, (), "/")


def test_versions_are_compared_by_number_and_none_depends_on_the_order_of_a_set():
    names = [f"libcuda.so.{each}" for each in ("550.9", "550.54", "550.054", "1000.1", "550.54.3")]
    for seed in range(20):
        random.Random(seed).shuffle(names)
        listing = {LIB64: tuple(names[:3]), "lib64": tuple(names[3:])}
        version, [sentence] = driver.version_in(listing, (LIB64, "lib64"), "", "/")
        assert version == "1000.1"
        assert "550.9, 550.054, 550.54, 550.54.3, 1000.1;" in sentence


@pytest.mark.parametrize(
    "name", ["libcuda.so.1", "libcuda.so", "libcuda.so.550.1.bak", "libcudart.so.12.4", "libcuda.so.550."]
)
def test_what_is_no_driver_library_with_a_version(name):
    with pytest.raises(driver.NoVersionError):
        driver.version_in({LIB64: (name,)}, (LIB64,), "", "/")


def test_of_too_many_libraries_the_ones_that_every_program_needs_stay():
    many = tuple(f"lib{at:04}.so.550.1" for at in range(600))
    listing: Listing = {LIB64: many, "usr/lib": ("libcuda.so.550.1", "libnvidia-ml.so.550.1")}
    paths, [sentence] = driver.libraries_of(listing, (LIB64, "usr/lib"), "550.1", "/driver")
    assert len(paths) == 512
    assert paths[:3] == ["/usr/lib/libcuda.so.550.1", "/usr/lib/libnvidia-ml.so.550.1", "/usr/lib64/lib0000.so.550.1"]
    assert "602" in sentence
    assert "512" in sentence


def test_ten_thousand_files_of_the_drivers_version_leave_nvidias_own_libraries_and_few_sentences():
    own = ("libcuda.so.550.1", "libnvidia-ml.so.550.1", "libnvidia-ptxjitcompiler.so.550.1", "libnvcuvid.so.550.1")
    strange = tuple(f"liba{at:05}.so.550.1" for at in range(10_000))
    paths, _ = driver.libraries_of({LIB64: tuple(sorted((*strange, *own)))}, (LIB64,), "550.1", "/driver")
    assert {path.rpartition("/")[2] for path in paths[: len(own)]} == set(own)
    seen = [
        SeenLibrary(Seen(path, target=path), fault="it is no ELF file" if "/liba" in path else "", machine="EM_X86_64",
                    soname=f"{path.rpartition('/')[2].partition('.so.')[0]}.so.1")
        for path in paths
    ]  # fmt: skip
    files = driver.chosen("550.1", seen, [], "/driver")
    assert {library.names[0] for library in files.libraries} == {f"{name.partition('.so.')[0]}.so.1" for name in own}
    assert not files.fault
    assert len(files.complaints) == 4  # three of those by name, and the others together
    assert (
        "more files in the driver root /driver are left out for the same reason: it is no ELF file"
        in files.complaints[-1]
    )


def test_the_processor_is_libcudas_and_what_is_for_another_or_for_32_bits_is_left_out():
    files = chosen(
        library("/usr/lib/libcuda.so.550.1", "libcuda.so.1", "EM_386", 32),
        library("/lib/libnvcuvid.so.550.1", "libnvcuvid.so.1", "EM_X86_64"),
        library("/usr/lib/libnvcuvid.so.550.1", "libnvcuvid.so.1", "EM_AARCH64", 32),
        library("/usr/lib64/libcuda.so.550.1", "libcuda.so.1", "EM_AARCH64"),
        library("/usr/lib64/libnvcuvid.so.550.1", "libnvcuvid.so.1", "EM_AARCH64"),
    )
    assert (files.machine, files.fault) == ("EM_AARCH64", "")
    assert [each.target for each in files.libraries] == [
        "/usr/lib64/libcuda.so.550.1",
        "/usr/lib64/libnvcuvid.so.550.1",
    ]
    assert driver.loader_directories(files.machine) == ("/usr/lib64", "/usr/lib/aarch64-linux-gnu")
    assert driver.loader_directories("EM_PPC64") == ("/usr/lib64",)
    only_old = chosen(library("/usr/lib/libcuda.so.550.1", "libcuda.so.1", "EM_386", 32))
    assert (
        only_old.fault == "the driver root / has no libcuda.so.550.1 that programs can load: it is for 32-bit programs"
    )


def test_no_name_is_given_to_two_libraries():
    files = chosen(
        library("/usr/lib64/libcuda.so.550.1", "libcuda.so.1"),
        library("/lib64/libcuda.so.550.1", "libcuda.so.1"),
        library("/usr/lib64/liblegacy.so.550.1", "libcuda.so"),
        library("/usr/lib64/libGLX_nvidia.so.550.1", "libGLX_nvidia.so.0"),
        library("/usr/lib64/vdpau/libvdpau_nvidia.so.550.1", "libcuda.so"),
        library("/usr/lib64/libnameless.so.550.1", ""),
    )
    assert [(each.names, each.target) for each in files.libraries] == [
        (("libcuda.so.1",), "/usr/lib64/libcuda.so.550.1"),  # libcuda.so is another's own name
        (("libcuda.so",), "/usr/lib64/liblegacy.so.550.1"),
        (("libGLX_nvidia.so.0", "libGLX_indirect.so.0"), "/usr/lib64/libGLX_nvidia.so.550.1"),
        (("vdpau/libcuda.so",), "/usr/lib64/vdpau/libvdpau_nvidia.so.550.1"),
        (("libnameless.so.550.1",), "/usr/lib64/libnameless.so.550.1"),
    ]


def test_other_files_are_given_unless_containers_must_not_have_them():
    unsafe = "it belongs to uid 1000"
    seen = [
        (Seen("/usr/bin/nvidia-smi", Kind.MISSING), driver.BINARY),
        (Seen("/usr/local/nvidia/bin/nvidia-smi", Kind.FILE, "/opt/nvidia-smi"), driver.BINARY),
        (Seen("/bin/nvidia-smi", Kind.FILE, "/bin/nvidia-smi"), driver.BINARY),
        (Seen("/sbin/nvidia-imex", Kind.FILE, "/sbin/nvidia-imex"), driver.BINARY),
        (Seen("/usr/bin/nvidia-debugdump", Kind.FILE, "/usr/bin/nvidia-debugdump", unsafe), driver.BINARY),
        (
            Seen("/run/nvidia-persistenced/socket", Kind.SOCKET, "/run/nvidia-persistenced/socket", unsafe),
            driver.SOCKET,
        ),
        (Seen("/run/nvidia-fabricmanager/socket", Kind.MISSING), driver.SOCKET),
        (Seen("/tmp/nvidia-mps", Kind.DIRECTORY, "/tmp/nvidia-mps"), driver.SOCKET),
        (Seen("/run/udev", Kind.DIRECTORY, "/run/udev"), driver.STORAGE),
        (Seen("/etc/cufile.json", Kind.FILE, "/etc/cufile.json", unsafe), driver.STORAGE),
    ]
    cuda = library("/usr/lib64/libcuda.so.550.1", "libcuda.so.1")
    files = driver.chosen("550.1", [cuda], seen, "/d")
    assert [(each.container_path, each.target, each.group) for each in files.files] == [
        ("/usr/bin/nvidia-smi", "/opt/nvidia-smi", driver.BINARY),
        ("/usr/sbin/nvidia-imex", "/sbin/nvidia-imex", driver.BINARY),
        ("/tmp/nvidia-mps", "/tmp/nvidia-mps", driver.SOCKET),
        ("/run/udev", "/run/udev", driver.STORAGE),
    ]
    assert files.complaints == (
        "/usr/bin/nvidia-smi in the driver root /d is left out: it is a broken link",
        f"/usr/bin/nvidia-debugdump in the driver root /d is left out: {unsafe}",
        f"/run/nvidia-persistenced/socket in the driver root /d is left out: {unsafe}",
        f"/etc/cufile.json in the driver root /d is left out: {unsafe}",
    )
