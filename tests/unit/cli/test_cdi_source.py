"""`gpu-plugin cdi generate`: the specification that it makes."""

import click
import msgspec
import pytest

from gpu_plugin.cli.cdi_source import built
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.hardware import hardware_for
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.opening_remedies import opening_remedy
from gpu_plugin.nvml.port import Driver, NvmlError


@pytest.mark.parametrize("strategy", ["auto", "envvar"])
def test_a_specification_is_the_same_whatever_the_device_list_strategy(strategy):
    settings = resolve({"simulate": "hgx-h100", "device_list_strategy": strategy}, {})
    named = msgspec.structs.replace(settings, device_list_strategy=("cdi-cri",))
    assert built(settings, None).specs == built(named, None).specs


class _Closed(Driver):
    def open(self):
        raise NvmlError(Return.NO_PERMISSION, "nvmlInit_v2")


def test_a_driver_that_cannot_be_opened_has_the_remedy_of_its_error(monkeypatch):
    hardware = msgspec.structs.replace(hardware_for(resolve({"simulate": "h200"}, {})), driver=_Closed())
    monkeypatch.setattr("gpu_plugin.cli.cdi_source.hardware_for", lambda _: hardware)
    with pytest.raises(click.ClickException) as caught:
        built(resolve({}, {}), None)
    assert opening_remedy(Return.NO_PERMISSION) in caught.value.message
