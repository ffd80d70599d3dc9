import msgspec
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import Settings

DEFAULTS = resolve({}, {})


@pytest.mark.parametrize(
    ("driver_root", "dev_root", "expected"),
    [("/", "", "/"), ("/run/nvidia/driver", "", "/run/nvidia/driver"), ("/run/nvidia/driver", "/", "/")],
)
def test_device_nodes_lie_under_the_driver_root_unless_told_otherwise(driver_root, dev_root, expected):
    settings = msgspec.structs.replace(DEFAULTS, driver_root=driver_root, dev_root=dev_root)
    assert settings.effective_dev_root == expected


def test_a_socket_at_the_root_lies_in_the_root():
    assert msgspec.structs.replace(DEFAULTS, kubelet_socket="/kubelet.sock").socket_dir == "/"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "/var/lib/kubelet/pod-resources/kubelet.sock"),
        ({"device_plugin_dir": "/run/k/device-plugins/"}, "/run/k/pod-resources/kubelet.sock"),
        ({"kubelet_socket": "/run/k/device-plugins/kubelet.sock"}, "/run/k/pod-resources/kubelet.sock"),
        ({"device_plugin_dir": "/plugins"}, "/pod-resources/kubelet.sock"),
        ({"device_plugin_dir": "/"}, "/pod-resources/kubelet.sock"),
        ({"device_plugin_dir": "/a/b", "pod_resources_socket": "/c/d.sock"}, "/c/d.sock"),
    ],
)
def test_the_pod_resources_socket_lies_in_the_kubelets_directory_unless_told_otherwise(flags, expected):
    assert resolve(flags, {}).effective_pod_resources_socket == expected


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_settings_of_which_one_differs_are_others_unless_it_is_the_remarks(name):
    changed = msgspec.structs.replace(DEFAULTS, **{name: object()})
    assert (changed == DEFAULTS, changed != DEFAULTS) == (name == "remarks", name != "remarks")


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        DEFAULTS.simulate = "h200"  # type: ignore[misc]
