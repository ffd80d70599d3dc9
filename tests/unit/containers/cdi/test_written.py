"""Content that our specifications must not have, though CDI and runtimes allow it."""

import pytest

from gpu_plugin.containers.cdi import written
from gpu_plugin.containers.cdi.spec import DeviceNode, Edits, Hook, Mount, Spec, SpecDevice, made
from gpu_plugin.containers.cdi.written import encoded, own_faults

NODE = DeviceNode(path="/dev/nvidia0")
LIBRARY = Mount(host_path="/usr/lib64/libcuda.so.1", container_path="/usr/lib64/libcuda.so.1", options=("ro", "rbind"))


def spec(*mounts: Mount, own: Edits | None = None, **common: object) -> Spec:
    device = SpecDevice(name="GPU-a", container_edits=own or Edits(device_nodes=(NODE,)))
    return made("k8s.device-plugin.nvidia.com/gpu", (device,), Edits(mounts=mounts or (LIBRARY,), **common))  # type: ignore[arg-type]


def mount(host: str = "/a", container: str = "/b", options: tuple[str, ...] = ("ro", "rbind")) -> Mount:
    return Mount(host_path=host, container_path=container, options=options)


def test_a_sound_one_is_written_and_reads_the_same():
    assert list(own_faults(spec())) == []
    assert b"libcuda.so.1" in encoded(spec())


UNCLEAN = ["/", "//", "/.", "/..", "/a/..", "/a/../etc", "/a/", "/a//b", "//a", "a", "./a"]
BAD_PATHS = [*UNCLEAN, "/a\nb", "/\x1b[31m", "/" + "x" * 4096]


@pytest.mark.parametrize(
    "made_of",
    [
        lambda path: spec(mount(host=path)),
        lambda path: spec(mount(container=path)),
        lambda path: spec(own=Edits(device_nodes=(DeviceNode(path=path),))),
        lambda path: spec(own=Edits(device_nodes=(DeviceNode(path="/dev/x", host_path=path),))),
        lambda path: spec(own=Edits(device_nodes=(NODE,), mounts=(mount(host=path),))),
        lambda path: spec(hooks=(Hook(hook_name="createContainer", path=path),)),
    ],
    ids=["host", "container", "node", "host's node", "of a device", "hook"],
)
def test_paths_are_absolute_clean_and_not_the_whole_file_system(made_of):
    for path in BAD_PATHS:
        with pytest.raises(ValueError, match=r"\$\."):
            encoded(made_of(path))


@pytest.mark.parametrize(
    "unfit",
    [
        spec(mount(host="")),
        spec(mount(container="")),
        spec(mount(options=("rbind",))),
        spec(mount(options=())),
        spec(mount(options=("ro", "rw"))),
        spec(mount(options=("ro", "suid"))),
        spec(mount(options=("ro", "bind,exec"))),
        spec(mount(), mount(host="/c")),
        spec(mount(), own=Edits(device_nodes=(NODE,), mounts=(mount(),))),
        spec(own=Edits(device_nodes=(NODE, NODE))),
        spec(device_nodes=(NODE,)),
        spec(own=Edits(device_nodes=(DeviceNode(path=""),))),
        spec(hooks=(Hook(hook_name="createContainer", path=""),)),
        spec(own=Edits()),
        spec(mount(host="/\udcff")),
        made("not a kind", spec().devices, Edits()),
        made(spec().kind, (), Edits()),
        made(spec().kind, (*spec().devices, *spec().devices), Edits()),
        made(spec().kind, (SpecDevice(name="-", container_edits=Edits(device_nodes=(NODE,))),), Edits()),
        spec(env=("no sign of equality",)),
    ],
)
def test_what_must_not_be_written(unfit):
    with pytest.raises(ValueError, match=r".{10}"):
        encoded(unfit)


def test_one_that_is_longer_than_anyone_reads_is_not_written(monkeypatch):
    size = len(encoded(spec()))
    monkeypatch.setattr(written, "MAX_BYTES", size)
    encoded(spec())
    monkeypatch.setattr(written, "MAX_BYTES", size - 1)
    with pytest.raises(ValueError, match=f"{size} bytes"):
        encoded(spec())


def test_of_a_thousand_faults_few_are_named():
    many = [mount(host="/", container=f"/c{at}") for at in range(1000)]
    with pytest.raises(ValueError, match="and 997 more") as error:
        encoded(spec(*many))
    assert len(str(error.value)) < 500
