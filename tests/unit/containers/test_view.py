import errno
import os
import stat

import pytest

from gpu_plugin.containers.cdi.host_files import DeviceFile
from gpu_plugin.containers.host_view import LinuxHost
from tests.device_nodes import device


@pytest.fixture
def sysfs(tmp_path):
    """A /sys whose PCI devices are on these NUMA nodes."""
    for bus_id, content in {
        "0000:00:06.0": "0\n",
        "0000:1b:00.0": "1\n",
        "0000:1c:00.0": "-1\n",
        "0000:1d:00.0": "many\n",
        "0000:1e:00.0": "",
        "10000:01:00.0": "7\n",
        "0000:01:00.0": "3\n",
        "abcd:02:00.0": "4\n",
    }.items():
        device = tmp_path / "sys/bus/pci/devices" / bus_id
        device.mkdir(parents=True)
        (device / "numa_node").write_text(content)
    (tmp_path / "sys/bus/pci/devices/0000:1f:00.0").mkdir()
    (tmp_path / "sys/bus/pci/devices/0000:20:00.0/numa_node").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:21:00.0").mkdir()
    (tmp_path / "sys/bus/pci/devices/0000:21:00.0/numa_node").write_bytes(b"\xff\xfe")
    return str(tmp_path / "sys")


@pytest.mark.parametrize(
    ("bus_id", "node"),
    [
        ("00000000:00:06.0", 0),
        ("00000000:1B:00.0", 1),
        ("0000:1b:00.0", 1),
        ("0000ABCD:02:00.0", 4),
        ("00010000:01:00.0", 7),  # a domain beyond 16 bits has five digits in sysfs
        ("00000000:1C:00.0", None),  # -1
        ("00000000:1D:00.0", None),  # no number
        ("00000000:1E:00.0", None),  # empty
        ("00000000:1F:00.0", None),  # no such file
        ("00000000:20:00.0", None),  # a directory
        ("00000000:21:00.0", None),  # no text
        ("00000000:99:00.0", None),  # no such device
        ("", None),
        ("no bus id", None),
        ("xyz:00:06.0", None),
        ("0000:\0", None),
    ],
)
def test_the_numa_node_of_a_pci_device(sysfs, bus_id, node):
    assert LinuxHost(sysfs=sysfs).numa_node(bus_id) == node


# Two GPUs behind switches, one in a domain of its own behind a host bridge's device, and one right at its host bridge.
PLACES = {
    "0000:19:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:19:00.0",
    "0000:3b:00.0": "pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:02.0/0000:3b:00.0",
    "10000:01:00.0": "pci0000:00/0000:00:0e.0/pci10000:00/10000:00:01.0/10000:01:00.0",
    "0000:00:06.0": "pci0000:00/0000:00:06.0",
}


@pytest.fixture
def bus(tmp_path):
    """A /sys with these PCI devices at their bridges, and a link to a missing device."""
    links = tmp_path / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    for address, place in PLACES.items():
        (tmp_path / "sys/devices" / place).mkdir(parents=True, exist_ok=True)
        (links / address).symlink_to(f"../../../devices/{place}")
    (links / "0000:99:00.0").symlink_to("../../../devices/pci0000:99/0000:99:00.0")
    (links / "0000:9a:00.0").symlink_to("0000:9a:00.0")
    return tmp_path / "sys"


@pytest.mark.parametrize(
    ("bus_id", "place"),
    [
        ("00000000:19:00.0", PLACES["0000:19:00.0"]),
        ("0000:3b:00.0", PLACES["0000:3b:00.0"]),
        ("00000000:3B:00.0", PLACES["0000:3b:00.0"]),
        ("00010000:01:00.0", PLACES["10000:01:00.0"]),
        ("00000000:00:06.0", PLACES["0000:00:06.0"]),
    ],
)
def test_the_place_of_a_pci_device_has_every_bridge_above_it(bus, bus_id, place):
    assert LinuxHost(sysfs=str(bus)).pci_path(bus_id) == str((bus / "devices").resolve() / place)


@pytest.mark.parametrize(
    "bus_id", ["00000000:99:00.0", "00000000:9A:00.0", "00000000:98:00.0", "", "no bus id", "xyz:00:06.0", "0000:\0"]
)
def test_the_place_of_a_device_that_is_not_there_is_empty(bus, bus_id):
    assert LinuxHost(sysfs=str(bus)).pci_path(bus_id) == ""
    assert LinuxHost(sysfs=str(bus / "none")).pci_path(bus_id) == ""


def numa(tmp_path, online, rows):
    """The host whose /sys has these NUMA nodes; None: the file is missing."""
    nodes = tmp_path / "sys/devices/system/node"
    nodes.mkdir(parents=True)
    if online is not None:
        (nodes / "online").write_text(online)
    for node, row in rows.items():
        (nodes / f"node{node}").mkdir()
        if row is not None:
            (nodes / f"node{node}/distance").write_bytes(row)
    return LinuxHost(sysfs=str(tmp_path / "sys"))


def test_columns_are_those_of_nodes_that_are_online(tmp_path):
    host = numa(
        tmp_path, "0-1,3,34\n", {0: b"10 40 80 81", 1: b"40 10 82 83", 3: b"80 82 10 84", 34: b"81 83 84 10", 2: b"1"}
    )
    found = host.numa_distances()
    assert len(found) == 16
    assert (found[0, 3], found[34, 1], found[3, 34], found[34, 34]) == (80, 83, 84, 10)


@pytest.mark.parametrize("row", [None, b"", b"10", b"10 20 30", b"10 far", b"\xff\xfe 10", b"10 2.5"], ids=repr)
def test_a_node_that_tells_nothing_of_use_hides_no_other(tmp_path, row):
    host = numa(tmp_path, "0-1\n", {0: row, 1: b"21 10\n"})
    assert host.numa_distances() == {(1, 0): 21, (1, 1): 10}


@pytest.mark.parametrize("online", [None, "", "\n", "all", "0-", "-1", "1-0", "0,", "0-1-2", "0-99999999", "1024"])
def test_without_a_list_of_nodes_no_distance_is_known(tmp_path, online):
    assert numa(tmp_path, online, {0: b"10 21\n", 1: b"21 10\n"}).numa_distances() == {}


def under(root):
    """The host whose only root is `root`."""
    seen = LinuxHost()
    seen._roots = {str(root): ""}
    return seen


def test_device_nodes_are_the_character_devices_a_container_could_get(tmp_path):
    wanted = {
        "/dev/nvidia0",
        "/dev/nvidia17",
        "/dev/nvidia-link",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-caps/nvidia-cap1",
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/gdrdrv",
        "/dev/infiniband/uverbs0",
    }
    for path in (*(wanted - {"/dev/nvidia-link"}), "/dev/sda", "/etc/nvidia0"):
        device(tmp_path / path[1:])
    (tmp_path / "dev/nvidia-file").write_text("a file")
    (tmp_path / "dev/nvidia-gone").symlink_to("nothing")
    (tmp_path / "dev/nvidia-outside").symlink_to("/dev/null")  # below the root, where it does not exist
    (tmp_path / "dev/nvidia-link").symlink_to("nvidia0")
    assert under(tmp_path).device_roots() == dict.fromkeys(wanted, "")


def test_nodes_under_another_root_go_by_their_path_under_dev(tmp_path):
    device(tmp_path / "driver/dev/nvidia93")
    nodes = LinuxHost([(str(tmp_path / "driver"), "/"), (str(tmp_path / "absent"), "")]).device_roots()
    assert "/dev/nvidia93" in nodes
    assert all(node.startswith("/dev/") for node in nodes)


def test_a_directory_that_cannot_be_read_hides_no_other(tmp_path, monkeypatch):
    device(tmp_path / "dev/nvidia-caps/nvidia-cap1")
    device(tmp_path / "dev/gdrdrv")
    real = os.open

    def refuse(name, *how, **more):
        if name == "nvidia-cap1":
            raise PermissionError(13, "no")
        return real(name, *how, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert under(tmp_path).device_roots() == {"/dev/gdrdrv": ""}


# Of an H200's, with lines that no driver writes in between.
MINORS = b"""config 1
monitor 2
gpu0/gi0/access 3
gpu0/gi0/ci0/access 4
gpu0/gi14/ci7/access 137
gpu31/gi14/ci7/access 4322

gpu1/gi0/access
gpu1/gi0/ci0/access many
gpu1/gi0/ci0 139
gpu1/gi/access 140
gpu1/gi2/access -1
gpu1/gi3/access 7 7
xgpu1/gi3/access 165
gpu1/gi4/access 174 \xff\xfe
gpu1/gi5/access\t183
gpu1/gi6/access 192
"""
LISTED = {
    "gpu0/gi0/access": 3,
    "gpu0/gi0/ci0/access": 4,
    "gpu0/gi14/ci7/access": 137,
    "gpu31/gi14/ci7/access": 4322,
    "gpu1/gi6/access": 192,
}


def minors(proc, content=MINORS):
    file = proc / "driver/nvidia-caps/mig-minors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_mig_minors_are_those_of_instances_whatever_else_is_in_the_file(tmp_path):
    minors(tmp_path)
    assert LinuxHost(procfs=str(tmp_path)).mig_minors() == LISTED


def test_without_the_file_there_are_no_mig_minors(tmp_path):
    host = LinuxHost([(str(tmp_path / "root"), "")], procfs=str(tmp_path / "proc"))
    assert host.mig_minors() == {}
    (tmp_path / "proc/driver/nvidia-caps/mig-minors").mkdir(parents=True)
    assert host.mig_minors() == {}


def test_mig_minors_of_another_root_count_where_proc_has_none(tmp_path):
    host = LinuxHost([(str(tmp_path / at), "") for at in ("absent", "driver")], procfs=str(tmp_path / "proc"))
    minors(tmp_path / "driver/proc", b"gpu0/gi1/access 12\n")
    assert host.mig_minors() == {"gpu0/gi1/access": 12}
    minors(tmp_path / "proc")
    assert host.mig_minors() == LISTED


def test_mig_minors_follow_the_file_and_stay_the_same_object_while_it_does(tmp_path):
    file = minors(tmp_path)
    host = LinuxHost(procfs=str(tmp_path))
    before = host.mig_minors()
    assert host.mig_minors() is before
    file.write_bytes(b"gpu0/gi0/access 30\n")
    assert host.mig_minors() == {"gpu0/gi0/access": 30}
    file.unlink()
    assert host.mig_minors() == {}


def test_the_boot_id_is_that_of_the_given_proc(tmp_path):
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("6f0d1a52-9c1e-5d0e-8a3b-0f5f4f1f2c77\n")
    assert LinuxHost(procfs=str(tmp_path)).boot_id() == "6f0d1a52-9c1e-5d0e-8a3b-0f5f4f1f2c77"


class Bindings:
    """A /sys in which the NVIDIA driver is bound to devices, by links as the kernel makes them."""

    def __init__(self, tmp_path):
        self.sysfs = tmp_path / "sys"
        self.directory = self.sysfs / "bus/pci/drivers/nvidia"
        self.directory.mkdir(parents=True)
        self.host = LinuxHost(sysfs=str(self.sysfs))

    def bind(self, *addresses):
        for address in addresses:
            # The new link exists before the old link goes, so that no file system gives both the same inode.
            fresh = self.directory / "fresh"
            fresh.symlink_to(f"../../../../devices/pci0000:00/{address}")
            fresh.rename(self.directory / address)


@pytest.fixture
def bindings(tmp_path):
    return Bindings(tmp_path)


def test_the_devices_bound_to_the_driver_go_by_nvmls_bus_ids(bindings):
    bindings.bind("0000:1b:00.0", "0000:00:06.0", "abcd:af:1f.7", "10000:01:00.0")
    for name in ("bind", "unbind", "new_id", "remove_id", "uevent"):
        (bindings.directory / name).touch()
    (bindings.directory / "module").symlink_to("../../../../module/nvidia")
    found = bindings.host.bindings()
    assert set(found) == {"00000000:1B:00.0", "00000000:00:06.0", "0000ABCD:AF:1F.7", "00010000:01:00.0"}
    assert len(set(found.values())) == 4
    assert all(0 < number < 1 << 63 for number in found.values())


def test_a_binding_keeps_its_number_until_it_is_made_anew(bindings, tmp_path):
    bindings.bind("0000:1b:00.0", "0000:1c:00.0")
    before = bindings.host.bindings()
    assert bindings.host.bindings() == before
    assert LinuxHost(sysfs=str(bindings.sysfs)).bindings() == before, "another process sees the same"
    bindings.bind("0000:1b:00.0")
    after = bindings.host.bindings()
    assert after["00000000:1B:00.0"] != before["00000000:1B:00.0"]
    assert after["00000000:1C:00.0"] == before["00000000:1C:00.0"]


def test_a_device_that_is_unbound_is_missing(bindings):
    bindings.bind("0000:1b:00.0", "0000:1c:00.0")
    (bindings.directory / "0000:1b:00.0").unlink()
    assert set(bindings.host.bindings()) == {"00000000:1C:00.0"}
    (bindings.directory / "0000:1c:00.0").unlink()
    assert bindings.host.bindings() == {}


def test_without_the_driver_nothing_is_bound(tmp_path):
    assert LinuxHost(sysfs=str(tmp_path / "none")).bindings() == {}
    (tmp_path / "sys/bus/pci/drivers").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/drivers/nvidia").touch()
    assert LinuxHost(sysfs=str(tmp_path / "sys")).bindings() == {}


@pytest.mark.parametrize(("code", "answer"), [(errno.EACCES, {}), (errno.EMFILE, None)])
def test_bindings_that_cannot_be_read_now_are_no_missing_gpus(bindings, monkeypatch, code, answer):
    bindings.bind("0000:1b:00.0")

    def refuse(path):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "scandir", refuse)
    if answer is None:
        with pytest.raises(OSError, match="Too many open files"):
            bindings.host.bindings()
    else:
        assert bindings.host.bindings() == answer


@pytest.mark.skipif(os.geteuid() != 0, reason="device nodes are made by root alone")
def test_device_nodes_with_their_numbers_and_the_drm_nodes_of_gpus(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    for place in ("dev/dri/by-path", "dev/nvidia-caps"):
        (root / place).mkdir(parents=True)
    (other / "dev").mkdir(parents=True)
    made = {
        root / "dev/nvidia0": (195, 0, 0o666),
        root / "dev/nvidia-caps/nvidia-cap1": (240, 1, 0o444),
        root / "dev/dri/card1": (226, 1, 0o660),
        other / "dev/nvidia0": (195, 9, 0o600),
        other / "dev/nvidia1": (195, 1, 0o666),
    }
    try:
        for path, (major, minor, mode) in made.items():
            os.mknod(path, stat.S_IFCHR, os.makedev(major, minor))
            path.chmod(mode)
    except PermissionError:
        pytest.skip("this container may make no device nodes")
    os.chown(root / "dev/dri/card1", 0, 44)
    (root / "dev/dri/by-path/pci-0000:1b:00.0-card").symlink_to("../card1")
    (root / "dev/dri/by-path/pci-0000:1b:00.0-render").symlink_to("../renderD128")
    (root / "dev/nvidia2").write_text("no device")
    os.mkfifo(root / "dev/nvidia3")
    drm = tmp_path / "sys/bus/pci/devices/0000:1b:00.0/drm"
    for name in ("renderD128", "card1", "version", "controlD65"):
        (drm / name).mkdir(parents=True)
    host = LinuxHost(
        [(str(root), "/"), (str(other), "/run/driver"), (str(tmp_path / "nothing"), "/nothing")],
        sysfs=str(tmp_path / "sys"),
        own=False,
    )
    devices = host.devices(["00000000:1B:00.0", "00000000:1C:00.0", "", "no bus id"])
    card = DeviceFile(226, 1, 0o660, 44)
    assert devices.nodes == {
        "/dev/nvidia0": DeviceFile(195, 0, 0o666),  # of the first root
        "/dev/nvidia1": DeviceFile(195, 1, 0o666, root="/run/driver"),
        "/dev/nvidia-caps/nvidia-cap1": DeviceFile(240, 1, 0o444),
        "/dev/dri/card1": card,
        "/dev/dri/by-path/pci-0000:1b:00.0-card": card,
    }
    assert devices.drm == {"00000000:1B:00.0": ("/dev/dri/card1", "/dev/dri/renderD128")}
    assert host.device_roots() == {
        "/dev/nvidia0": "",
        "/dev/nvidia1": "/run/driver",
        "/dev/nvidia-caps/nvidia-cap1": "",
    }


def test_what_sysfs_says_of_the_machine_and_of_a_pci_device(tmp_path):
    host = LinuxHost(sysfs=str(tmp_path))
    for answers in (host.machine(), host.pci_class("00000000:1B:00.0"), host.pci_class("no bus id")):
        assert answers is None
    assert host.pci_config("00000000:1B:00.0") == host.pci_config("no bus id") == b""
    (tmp_path / "class/dmi/id").mkdir(parents=True)
    (tmp_path / "class/dmi/id/product_name").write_bytes(b"DGX\xff A100 \n")
    assert host.machine() == "DGX\ufffd A100"
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "class").write_text("0x030200\n")
    (device / "config").write_bytes(bytes(range(256)) * 16)
    assert host.pci_class("00000000:1B:00.0") == 0x030200
    assert host.pci_config("00000000:1B:00.0") == bytes(range(256))
    (device / "class").write_text("what?\n")
    assert host.pci_class("00000000:1B:00.0") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_device_nodes_that_a_user_could_replace_are_no_containers(tmp_path):
    for name in ("nvidia0", "nvidiactl", "nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"):
        device(tmp_path / "dev" / name)
    (tmp_path / "dev/nvidia1").symlink_to("nvidia0")
    os.lchown(tmp_path / "dev/nvidia1", 1000, 1000)
    os.chown(tmp_path / "dev/nvidia0", 1000, 1000)  # the driver's option NVreg_DeviceFileUID: the node's numbers stay
    (tmp_path / "dev/nvidia-caps").chmod(0o777)
    host = under(tmp_path)
    found = host.devices(())
    assert set(found.nodes) == set(host.device_roots()) == {"/dev/nvidia0", "/dev/nvidiactl"}
    caps = {f"/dev/nvidia-caps/nvidia-cap{at}" for at in (1, 2)}
    assert set(found.faults) == {"/dev/nvidia1", *caps}
    assert all("chmod" in found.faults[path] for path in caps)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_device_node_that_is_safe_below_a_later_root_is_taken_from_there(tmp_path):
    for root in ("first", "second"):
        device(tmp_path / root / "dev/nvidia0")
    (tmp_path / "first/dev").chmod(0o777)
    host = LinuxHost([(str(tmp_path / root), f"/{root}") for root in ("first", "second")], own=False)
    found = host.devices(())
    assert {path: node.root for path, node in found.nodes.items()} == {"/dev/nvidia0": "/second"}
    assert found.faults == {}


def test_gpus_of_nvidia_on_the_pci_bus_with_the_drivers_bound_to_them(tmp_path):
    devices = tmp_path / "bus/pci/devices"
    host = LinuxHost(sysfs=str(tmp_path))
    assert host.pci_gpus() is None, "no PCI bus is listed"

    def put(name, vendor, kind, driver="", function=""):
        device = devices / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
        for link, to in (("driver", driver), ("physfn", function)):
            if to:
                (tmp_path / to).mkdir(parents=True, exist_ok=True)
                (device / link).symlink_to(tmp_path / to)

    put("0000:1b:00.0", "0x10de", "0x030200", "drivers/nvidia")
    put("0000:1c:00.0", "0x10de", "0x030000")
    put("0000:1d:00.0", "0x10de", "0x030200", "drivers/vfio-pci")
    put("0000:1b:00.4", "0x10de", "0x030200", "drivers/nvidia", "devices/physical")
    put("0000:1e:00.0", "0x10de", "0x068000", "drivers/nvidia-nvswitch")
    put("0000:1f:00.0", "0x1002", "0x030000", "drivers/amdgpu")
    (devices / "0000:20:00.0").mkdir()
    told = {"00000000:1B:00.0": "nvidia", "00000000:1C:00.0": "", "00000000:1D:00.0": "vfio-pci"}
    assert host.pci_gpus() == told
    (devices / "0000:1d:00.0/driver").unlink()
    put("0000:21:00.0", "0x10de", "0x030200")
    assert host.pci_gpus() == told | {"00000000:1D:00.0": "", "00000000:21:00.0": ""}
