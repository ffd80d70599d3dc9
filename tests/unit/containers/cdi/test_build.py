"""CDI specifications of nodes: the devices by each name, and the common edits."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi import driver, spec
from gpu_plugin.containers.cdi.build import READ_ONLY, SOCKET_OPTIONS, Built, build
from gpu_plugin.containers.cdi.host_files import DeviceFile, DriverFiles, HostDevices, Library, PlacedFile
from gpu_plugin.containers.cdi.options import HOOKS, NO_GIDS, NO_SOCKETS, CdiOptions
from gpu_plugin.containers.cdi.spec import DeviceNode, Edits, Mount, Spec
from gpu_plugin.containers.cdi.written import encoded
from gpu_plugin.devices.device import PLACEHOLDER
from gpu_plugin.devices.node import Gpu, MigDevice

GPU_FILE = "k8s.device-plugin.nvidia.com-gpu.json"
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


def library(target: str, *names: str, path: str = "") -> Library:
    return Library(target, names, path or target)


ALLOCATOR = "/usr/lib64/libnvidia-allocator.so.550.1"
FILES = DriverFiles(
    "550.1",
    "EM_X86_64",
    (
        library("/usr/lib64/libcuda.so.550.1", "libcuda.so.1", "libcuda.so"),
        library(ALLOCATOR, "libnvidia-allocator.so.1"),
        library("/usr/lib64/vdpau/libvdpau_nvidia.so.550.1", "vdpau/libvdpau_nvidia.so.1"),
        library(ALLOCATOR, "gbm/nvidia-drm_gbm.so", path="/usr/lib64/gbm/nvidia-drm_gbm.so"),
    ),
    (
        PlacedFile("/opt/nvidia-smi", "/usr/bin/nvidia-smi", driver.BINARY),
        PlacedFile("/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket", driver.SOCKET),
        PlacedFile("/run/udev", "/run/udev", driver.STORAGE),
        PlacedFile("/etc/cufile.json", "/etc/cufile.json", driver.STORAGE),
    ),
)


def nodes(*paths: str) -> dict[str, DeviceFile]:
    return {path: DeviceFile(195, at) for at, path in enumerate((*CONTROL, *paths))}


def plain(count: int = 1) -> tuple[list[Gpu], HostDevices]:
    gpus = [Gpu(f"GPU-{at}", at, minor=at, pci_bus_id=f"00000000:{at:02X}:00.0") for at in range(count)]
    return gpus, HostDevices(nodes(*(f"/dev/nvidia{at}" for at in range(count))))


def partitioned() -> tuple[list[Gpu], HostDevices]:
    migs = (
        MigDevice("MIG-a", 0, 1, 0, "3g.40gb", gpu_instance_cap=21, compute_instance_cap=22),
        MigDevice("MIG-b", 1, 2, 0, "1g.24gb+gfx", gpu_instance_cap=30, compute_instance_cap=31),
    )
    gpu = Gpu("GPU-0", 0, minor=3, pci_bus_id="00000000:1B:00.0", mig_enabled=True, mig_devices=migs)
    caps = [f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in (21, 22, 30, 31)]
    return [gpu], HostDevices(nodes("/dev/nvidia3", *caps, "/dev/dri/card1"), {"00000000:1B:00.0": ("/dev/dri/card1",)})


def of(built: Built, file: str = GPU_FILE) -> Spec:
    made = built.specs[file]
    assert spec.from_json(encoded(made)) == made
    return made


def paths(made: Spec) -> dict[str, list[str]]:
    return {each.name: [node.path for node in each.container_edits.device_nodes] for each in made.devices}


def test_a_whole_gpu_by_uuid_by_index_and_all_of_them():
    made = of(build(*plain(2), FILES, CdiOptions()))
    assert made.kind == "k8s.device-plugin.nvidia.com/gpu"
    assert paths(made) == {
        "GPU-0": ["/dev/nvidia0"],
        "0": ["/dev/nvidia0"],
        "GPU-1": ["/dev/nvidia1"],
        "1": ["/dev/nvidia1"],
        "all": ["/dev/nvidia0", "/dev/nvidia1"],
    }
    assert made.container_edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)
    assert [node.path for node in made.container_edits.device_nodes] == list(CONTROL)
    assert made.devices[0].container_edits.device_nodes == (
        DeviceNode(path="/dev/nvidia0", type="c", major=195, minor=4, file_mode=0o666, permissions="rw"),
    )
    assert made.cdi_version == "0.5.0"  # for the sake of "0"


def test_mig_devices_have_their_gpus_node_and_their_capabilities_and_those_that_draw_its_drm_nodes_too():
    made = of(build(*partitioned(), FILES, CdiOptions()))
    whole, caps = ["/dev/nvidia3"], [f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in (21, 22, 30, 31)]
    assert paths(made) == {
        "GPU-0": [*whole, "/dev/dri/card1"],
        "0": [*whole, "/dev/dri/card1"],
        "MIG-a": [*whole, *caps[:2]],
        "0:0": [*whole, *caps[:2]],
        "MIG-b": [*whole, *caps[2:], "/dev/dri/card1"],
        "0:1": [*whole, *caps[2:], "/dev/dri/card1"],
        "all": [*whole, "/dev/dri/card1", *caps],
    }


def test_what_lacks_its_node_is_left_out_with_a_sentence_and_the_others_stay():
    gpus, host = partitioned()
    there = {path: each for path, each in host.nodes.items() if path != "/dev/nvidia-caps/nvidia-cap22"}
    lost = Gpu("GPU-lost", 1, unreadable="it fell off the bus")
    built = build([*gpus, lost, Gpu("GPU-2", 2, minor=9)], HostDevices(there, host.drm), FILES, CdiOptions())
    assert set(paths(of(built))) == {"GPU-0", "0", "MIG-b", "0:1", "all"}
    capability = (
        "its device node /dev/nvidia-caps/nvidia-cap22 does not exist on this node (nvidia-modprobe -f makes it from the "
        "file of the same instance under /proc/driver/nvidia/capabilities)"
    )
    node = "its device node /dev/nvidia9 does not exist on this node (nvidia-modprobe -c and -u make the device nodes of GPUs)"
    unknown = "its minor number is not known: the driver could not describe it"
    assert built.missing == {
        **dict.fromkeys(("MIG-a", "0:0"), capability),
        **dict.fromkeys(("GPU-lost", "1"), unknown),
        **dict.fromkeys(("GPU-2", "2"), node),
    }
    assert built.trouble == ""


def test_a_mig_device_whose_capabilities_are_not_known_is_left_out():
    gpu = Gpu("GPU-0", 0, minor=0, mig_devices=(MigDevice("MIG-a", 0, 1, 0, "1g.10gb", compute_instance_cap=22),))
    built = build([gpu], HostDevices(nodes("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap22")), FILES, CdiOptions())
    assert set(paths(of(built))) == {"GPU-0", "0", "all"}
    why = "its capability nodes are not known: does /proc/driver/nvidia-caps/mig-minors exist here?"
    assert built.missing == {"MIG-a": why, "0:0": why}


def test_a_name_that_two_gpus_have_is_no_ones():
    """A GPU that fell off the bus keeps index 0, and the driver gives 0 to the next GPU."""
    gpus = [Gpu("GPU-a", 0, minor=0), Gpu("GPU-b", 0, minor=1), Gpu("GPU-b", 2, minor=1)]
    built = build(gpus, HostDevices(nodes("/dev/nvidia0", "/dev/nvidia1")), FILES, CdiOptions())
    assert paths(of(built)) == {
        "GPU-a": ["/dev/nvidia0"],
        "2": ["/dev/nvidia1"],
        "all": ["/dev/nvidia0", "/dev/nvidia1"],
    }
    why = "the driver gives its name to two devices now"
    assert built.missing == {"0": why, "GPU-b": why}


def test_gpus_whose_uuid_is_made_up_are_in_no_specification():
    gpus, host = plain()
    unknown = Gpu(f"{PLACEHOLDER}7", 7, minor=7)
    there = HostDevices(nodes("/dev/nvidia0", "/dev/nvidia7"))
    assert paths(of(build([*gpus, unknown], there, FILES, CdiOptions()))) == {
        "GPU-0": ["/dev/nvidia0"],
        "0": ["/dev/nvidia0"],
        "all": ["/dev/nvidia0"],
    }
    built = build([unknown], host, FILES, CdiOptions())
    assert (built.specs, built.trouble) == ({}, "the driver could not describe any GPU of this node")


def test_without_a_gpu_there_is_no_specification_of_any_and_no_trouble():
    assert build([], HostDevices(nodes()), FILES, CdiOptions()) == Built()


def test_without_a_device_node_of_a_gpu_or_a_usable_driver_the_trouble_is_named():
    gpus, host = plain(2)
    built = build(gpus, HostDevices(nodes(), searched=("/driver-root", "/")), FILES, CdiOptions())
    assert built.specs == {}
    assert built.trouble == (
        "no GPU of this node has its device node under /driver-root or /: its device node /dev/nvidia0 does not exist on "
        "this node (nvidia-modprobe -c and -u make the device nodes of GPUs)"
    )
    broken = DriverFiles(fault="no libcuda")
    assert build(gpus, host, broken, CdiOptions()).trouble == "no libcuda"
    assert build(gpus, host, broken, CdiOptions()).specs == {}


def test_groups_and_names_by_path_of_drm_nodes():
    card, render = DeviceFile(226, 1, 0o660, 44), DeviceFile(226, 129, 0o666, 105)
    there = nodes("/dev/nvidia0") | {
        "/dev/dri/card1": card,
        "/dev/dri/renderD129": render,
        "/dev/dri/by-path/pci-0000:1b:00.0-card": card,
        "/dev/dri/by-path/pci-0000:1b:00.0-render": render,
        "/dev/dri/by-path/pci-10000:1b:00.0-card": DeviceFile(226, 7),
        "/dev/dri/by-path/pci-0000:1b:00.1-card": DeviceFile(226, 8),
        "/dev/dri/card7": DeviceFile(226, 7),
    }
    drm = {"00000000:1B:00.0": ("/dev/dri/card1", "/dev/dri/controlD9", "/dev/dri/renderD129")}
    gpu = Gpu("GPU-0", 0, minor=0, pci_bus_id="00000000:1B:00.0")
    made = of(build([gpu], HostDevices(there, drm), FILES, CdiOptions()))
    edits = made.devices[0].container_edits
    assert [(node.path, node.minor, node.gid) for node in edits.device_nodes] == [
        ("/dev/nvidia0", 4, None),
        ("/dev/dri/card1", 1, 44),
        ("/dev/dri/renderD129", 129, 105),
        ("/dev/dri/by-path/pci-0000:1b:00.0-card", 1, 44),
        ("/dev/dri/by-path/pci-0000:1b:00.0-render", 129, 105),
    ]
    assert edits.additional_gids == (44,)  # a node that every user may open needs no group
    assert made.cdi_version == "0.7.0"
    for mode, groups in ((0o664, (44,)), (0o662, (44,)), (0o666, ()), (0o660, (44,))):
        other = HostDevices(nodes("/dev/nvidia0") | {"/dev/dri/card1": DeviceFile(226, 1, mode, 44)}, drm)
        assert of(build([gpu], other, FILES, CdiOptions())).devices[0].container_edits.additional_gids == groups
    without = of(build([gpu], HostDevices(there, drm), FILES, CdiOptions(feature_flags=frozenset({NO_GIDS}))))
    assert {each.container_edits.additional_gids for each in without.devices} == {()}
    assert without.cdi_version == "0.5.0"


@pytest.mark.parametrize(
    ("bus_id", "by_path"),
    [
        ("00010000:01:00.0", "pci-10000:01:00.0-card"),  # a domain beyond 16 bits, as of Intel's VMD
        ("0000ABCD:01:00.0", "pci-abcd:01:00.0-card"),
        ("", "pci-0000:-card"),
        ("no bus id", "pci-id:-card"),
    ],
)
def test_names_by_path_have_the_domain_as_the_kernel_writes_it(bus_id, by_path):
    there = HostDevices(nodes("/dev/nvidia0", f"/dev/dri/by-path/{by_path}", "/dev/dri/by-path/pci-0000:01:00.0-card"))
    made = of(build([Gpu("GPU-0", 0, minor=0, pci_bus_id=bus_id)], there, FILES, CdiOptions()))
    expected = [f"/dev/dri/by-path/{by_path}"] if len(bus_id) == 16 else []
    assert paths(made)["0"] == ["/dev/nvidia0", *expected]


def test_every_library_is_bound_at_its_names_where_loaders_look_and_files_where_they_belong():
    made = of(build(*plain(), FILES, CdiOptions(driver_root="/run/nvidia/driver")))
    at = {mount.container_path: mount for mount in made.container_edits.mounts}
    assert len(at) == len(made.container_edits.mounts)
    libraries = {
        "libcuda.so.1": "/usr/lib64/libcuda.so.550.1",
        "libcuda.so": "/usr/lib64/libcuda.so.550.1",
        "libnvidia-allocator.so.1": "/usr/lib64/libnvidia-allocator.so.550.1",
        "vdpau/libvdpau_nvidia.so.1": "/usr/lib64/vdpau/libvdpau_nvidia.so.550.1",
        "gbm/nvidia-drm_gbm.so": "/usr/lib64/libnvidia-allocator.so.550.1",
    }
    expected = {
        f"{directory}/{name}": f"/run/nvidia/driver{target}"
        for directory in ("/usr/lib64", "/usr/lib/x86_64-linux-gnu")
        for name, target in libraries.items()
    }
    expected["/usr/bin/nvidia-smi"] = "/run/nvidia/driver/opt/nvidia-smi"
    expected["/run/nvidia-persistenced/socket"] = "/run/nvidia/driver/run/nvidia-persistenced/socket"
    assert {path: mount.host_path for path, mount in at.items()} == expected
    socket = at.pop("/run/nvidia-persistenced/socket")
    assert socket.options == SOCKET_OPTIONS == ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")
    assert {mount.options for mount in at.values()} == {READ_ONLY} == {("ro", "nosuid", "nodev", "rbind", "rprivate")}
    assert made.container_edits.hooks == ()


def test_sockets_stay_away_where_that_is_asked_for():
    made = of(build(*plain(), FILES, CdiOptions(feature_flags=frozenset({NO_SOCKETS}))))
    assert [mount.container_path for mount in made.container_edits.mounts if "socket" in mount.container_path] == []
    assert "/usr/bin/nvidia-smi" in [mount.container_path for mount in made.container_edits.mounts]


def test_device_nodes_have_the_host_paths_of_the_roots_where_they_were_found():
    gpus, _ = plain()
    elsewhere = DeviceFile(195, 0, root="/run/nvidia/driver")
    host = HostDevices({"/dev/nvidia0": elsewhere, **nodes("/dev/nvidiactl")})
    made = of(build(gpus, host, FILES, CdiOptions(driver_root="/run/nvidia/driver")))
    every = [*made.container_edits.device_nodes, *made.devices[0].container_edits.device_nodes]
    hosts = {node.path: node.host_path for node in every}
    assert (hosts["/dev/nvidia0"], hosts["/dev/nvidiactl"]) == ("/run/nvidia/driver/dev/nvidia0", "")
    made = of(build(gpus, host, FILES, CdiOptions(dev_root="")))  # --nvidia-dev-root=/
    assert [node.host_path for node in made.devices[0].container_edits.device_nodes] == [""]


def test_imex_channels_are_those_that_exist():
    node = "/dev/nvidia-caps-imex-channels/channel"
    gpus, _ = plain()
    host = HostDevices(nodes(f"{node}0", f"{node}7", "/dev/nvidia0"))
    built = build(gpus, host, FILES, CdiOptions(imex_channels=(0, 5, 7)))
    made = of(built, "k8s.device-plugin.nvidia.com-imex-channel.json")
    assert paths(made) == {"0": [f"{node}0"], "7": [f"{node}7"], "all": [f"{node}0", f"{node}7"]}
    assert made.container_edits == Edits(env=("NVIDIA_VISIBLE_DEVICES=void",))
    none = build(gpus, host, FILES, CdiOptions(imex_channels=(5,)))
    assert set(none.specs) == {GPU_FILE}


STORAGE = [
    Mount(host_path="/d/run/udev", container_path="/run/udev", options=READ_ONLY),
    Mount(host_path="/d/etc/cufile.json", container_path="/etc/cufile.json", options=READ_ONLY),
]


@pytest.mark.parametrize(
    ("name", "given", "mounts"),
    [
        ("gdrcopy", ["/dev/gdrdrv"], []),
        ("gds", ["/dev/nvidia-fs0", "/dev/nvidia-fs15"], STORAGE),
        ("mofed", ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"], []),
    ],
)
def test_the_classes_beside_gpus(name, given, mounts):
    gpus, _ = plain()
    others = ["/dev/infiniband/issm0", "/dev/nvidia-nvswitch0"]
    host = HostDevices(nodes(*reversed(given), *others, "/dev/nvidia0"))
    built = build(gpus, host, FILES, CdiOptions(driver_root="/d", classes=("gdrcopy", "gds", "mofed")))
    file = f"k8s.device-plugin.nvidia.com-{name}.json"
    assert set(built.specs) == {GPU_FILE, file}
    made = of(built, file)
    assert made.kind == f"k8s.device-plugin.nvidia.com/{name}"
    assert paths(made) == {"all": given}
    assert made.container_edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)
    assert list(made.container_edits.mounts) == mounts
    assert set(build(gpus, host, FILES, CdiOptions()).specs) == {GPU_FILE}


def test_the_classes_need_neither_a_gpu_nor_a_driver_and_heed_the_flag_on_groups():
    host = HostDevices({"/dev/gdrdrv": DeviceFile(508, 0, 0o660, 44)})
    file = cdi_names.file_name(cdi_names.GDRCOPY)
    built = build([], host, DriverFiles(fault="none"), CdiOptions(classes=("gdrcopy",)))
    assert of(built, file).devices[0].container_edits.additional_gids == (44,)
    flagged = build([], host, DriverFiles(), CdiOptions(classes=("gdrcopy",), feature_flags=frozenset({NO_GIDS})))
    assert of(flagged, file).devices[0].container_edits.additional_gids == ()


def test_with_a_hook_libraries_are_bound_where_they_are_and_nvidias_hooks_do_the_rest():
    built = build(*plain(), FILES, CdiOptions(driver_root="/d", hook="/usr/bin/nvidia-ctk"))
    edits = of(built).container_edits
    assert edits.env == ("NVIDIA_CTK_LIBCUDA_DIR=/usr/lib64", "NVIDIA_VISIBLE_DEVICES=void")
    bound = [mount.container_path for mount in edits.mounts]
    assert bound == [
        "/usr/lib64/libcuda.so.550.1",
        "/usr/lib64/libnvidia-allocator.so.550.1",  # once, though it has two names
        "/usr/lib64/vdpau/libvdpau_nvidia.so.550.1",
        "/usr/bin/nvidia-smi",
        "/run/nvidia-persistenced/socket",
    ]
    assert [mount.host_path for mount in edits.mounts][:3] == [f"/d{path}" for path in bound[:3]]
    assert {hook.hook_name for hook in edits.hooks} == {"createContainer"}
    assert {hook.path for hook in edits.hooks} == {"/usr/bin/nvidia-ctk"}
    assert [hook.args for hook in edits.hooks] == [
        (
            *("nvidia-ctk", "hook", "create-symlinks"),
            *("--link", "libcuda.so.550.1::/usr/lib64/libcuda.so.1"),
            *("--link", "libcuda.so.1::/usr/lib64/libcuda.so"),
            *("--link", "libnvidia-allocator.so.550.1::/usr/lib64/libnvidia-allocator.so.1"),
            *("--link", "libvdpau_nvidia.so.550.1::/usr/lib64/vdpau/libvdpau_nvidia.so.1"),
            *("--link", "/usr/lib64/libnvidia-allocator.so.550.1::/usr/lib64/gbm/nvidia-drm_gbm.so"),
        ),
        ("nvidia-ctk", "hook", "enable-cuda-compat", "--host-driver-version=550.1"),
        ("nvidia-ctk", "hook", "update-ldcache", "--folder", "/usr/lib64", "--folder", "/usr/lib64/vdpau"),
        ("nvidia-ctk", "hook", "disable-device-node-modification"),
        ("nvidia-ctk", "hook", "update-application-profile"),
    ]


@pytest.mark.parametrize("disabled", [*HOOKS, "all"])
def test_hooks_that_are_turned_off_are_left_out_and_nvidia_cdi_hook_is_called_without_the_word(disabled):
    options = CdiOptions(hook="/opt/nvidia-cdi-hook", disabled_hooks=frozenset({disabled}))
    found = of(build(*plain(), FILES, options)).container_edits.hooks
    expected = [name for name in HOOKS if disabled not in (name, "all")]
    assert [hook.args[:2] for hook in found] == [("nvidia-cdi-hook", name) for name in expected]


host_files = st.builds(DeviceFile, st.integers(0, 511), st.integers(0, 255), st.integers(0, 0o777), st.integers(0, 9))
gpus = st.builds(
    Gpu,
    uuid=st.sampled_from(["GPU-a", "GPU-b", "GPU-c", f"{PLACEHOLDER}0"]),
    index=st.integers(0, 2),
    minor=st.none() | st.integers(0, 2),
    pci_bus_id=st.sampled_from(["", "00000000:01:00.0", "00010000:01:00.0", "?:?"]),
    mig_devices=st.lists(
        st.builds(
            MigDevice,
            uuid=st.sampled_from(["MIG-a", "MIG-b"]),
            index=st.integers(0, 1),
            gpu_instance=st.just(1),
            compute_instance=st.just(0),
            profile=st.sampled_from(["1g.10gb", "1g.24gb+gfx", "1g.10gb+me", "1g.24gb+me.gfx"]),
            gpu_instance_cap=st.none() | st.integers(1, 2),
            compute_instance_cap=st.none() | st.integers(1, 2),
        ),
        max_size=2,
    ).map(tuple),
)
some_nodes = st.dictionaries(
    st.sampled_from(
        [
            *CONTROL,
            *(f"/dev/nvidia{at}" for at in range(3)),
            *(f"/dev/nvidia-caps/nvidia-cap{at}" for at in (1, 2)),
            *("/dev/dri/card0", "/dev/dri/by-path/pci-0000:01:00.0-card", "/dev/gdrdrv", "/dev/nvidia-fs0"),
            "/dev/nvidia-caps-imex-channels/channel0",
        ]
    ),
    host_files,
)


@given(
    found=st.lists(gpus, max_size=4, unique_by=lambda gpu: (gpu.uuid, gpu.index)),
    there=some_nodes,
    options=st.builds(
        CdiOptions,
        dev_root=st.sampled_from(["", "/run/nvidia/driver"]),
        driver_root=st.sampled_from(["", "/run/nvidia/driver"]),
        classes=st.sampled_from([(), ("gdrcopy", "gds", "mofed")]),
        imex_channels=st.sampled_from([(), (0, 1)]),
        hook=st.sampled_from(["", "/usr/bin/nvidia-ctk"]),
        feature_flags=st.sets(st.sampled_from([NO_GIDS, NO_SOCKETS])).map(frozenset),
    ),
    seed=st.integers(0, 9),
)
def test_whatever_a_node_has_its_specifications_are_valid_true_and_the_same_bytes_every_time(
    found, there, options, seed
):
    host = HostDevices(there, {"00000000:01:00.0": ("/dev/dri/card0", "/dev/dri/card9")})
    built = build(found, host, FILES, options)
    for file in built.specs:
        made = of(built, file)
        every = [made.container_edits, *(device.container_edits for device in made.devices)]
        for node in (node for edits in every for node in edits.device_nodes):
            assert there[node.path] == DeviceFile(node.major, node.minor, node.file_mode or 0, node.gid or 0)
            assert node.host_path == (f"{options.dev_root}{node.path}" if options.dev_root else "")
        mounted = [mount.container_path for mount in made.container_edits.mounts]
        assert len(mounted) == len(set(mounted))
    served = {device.name for device in built.specs[GPU_FILE].devices} if GPU_FILE in built.specs else set()
    assert not served & built.missing.keys()
    shuffled = dict(random.Random(seed).sample(sorted(there.items()), len(there)))
    again = build(random.Random(seed).sample(found, len(found)), HostDevices(shuffled, host.drm), FILES, options)
    assert {name: spec.to_json(each) for name, each in again.specs.items()} == {
        name: spec.to_json(each) for name, each in built.specs.items()
    }


def test_why_a_device_node_is_left_out_is_said_of_its_gpu_and_once():
    host = HostDevices(
        {"/dev/nvidia1": DeviceFile(195, 1)}, faults={"/dev/nvidia0": "others than root can write to /dev"}
    )
    built = build([Gpu("GPU-0", 0, minor=0), Gpu("GPU-1", 1, minor=1)], host, FILES, CdiOptions())
    assert "others than root can write to /dev" in built.missing["GPU-0"]
    assert [each for each in built.complaints if "/dev/nvidia0" in each] == [
        "/dev/nvidia0 is left out: others than root can write to /dev"
    ]
