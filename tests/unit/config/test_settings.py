import msgspec
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import Settings

DEFAULTS = resolve({}, {})


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
def test_settings_of_which_one_differs_are_others_unless_it_changes_nothing(name):
    changed = msgspec.structs.replace(DEFAULTS, **{name: object()})
    same = name in {"remarks", "without_effect"}
    assert (changed == DEFAULTS, changed != DEFAULTS) == (same, not same)


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        DEFAULTS.simulate = "h200"  # type: ignore[misc]
