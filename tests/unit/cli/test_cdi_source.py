"""`gpu-plugin cdi generate`: the specification that it makes."""

import msgspec
import pytest

from gpu_plugin.cli.cdi_source import built
from gpu_plugin.config.resolve import resolve


@pytest.mark.parametrize("strategy", ["auto", "envvar"])
def test_a_specification_is_the_same_whatever_the_device_list_strategy(strategy):
    settings = resolve({"simulate": "hgx-h100", "device_list_strategy": strategy}, {})
    named = msgspec.structs.replace(settings, device_list_strategy=("cdi-cri",))
    assert built(settings, None).specs == built(named, None).specs
