import dataclasses

import pytest

from gpu_plugin.config.resolve import resolve

DEFAULTS = resolve({}, {})


@pytest.mark.parametrize(
    ("driver_root", "dev_root", "expected"),
    [("/", "", "/"), ("/run/nvidia/driver", "", "/run/nvidia/driver"), ("/run/nvidia/driver", "/", "/")],
)
def test_device_nodes_lie_under_the_driver_root_unless_told_otherwise(driver_root, dev_root, expected):
    settings = dataclasses.replace(DEFAULTS, driver_root=driver_root, dev_root=dev_root)
    assert settings.effective_dev_root == expected


def test_a_socket_at_the_root_lies_in_the_root():
    assert dataclasses.replace(DEFAULTS, kubelet_socket="/kubelet.sock").socket_dir == "/"


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULTS.simulate = "h200"  # type: ignore[misc]
