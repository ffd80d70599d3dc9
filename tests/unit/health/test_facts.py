import pytest

from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.health.observation import Facts, facts

AMPERE, ADA, HOPPER, BLACKWELL = 7, 8, 9, 10


@pytest.mark.parametrize(
    ("model", "architecture", "contains"),
    [
        ("NVIDIA A100-SXM4-80GB", AMPERE, True),
        ("NVIDIA A100X", AMPERE, True),
        ("NVIDIA A800-SXM4-80GB", AMPERE, True),
        ("NVIDIA A30", AMPERE, True),
        ("NVIDIA A10", AMPERE, False),
        ("NVIDIA A40", AMPERE, False),
        ("NVIDIA RTX A3000 Laptop GPU", AMPERE, False),
        ("NVIDIA L40S", ADA, False),
        ("NVIDIA H100 80GB HBM3", HOPPER, True),
        ("NVIDIA GH200 480GB", HOPPER, True),
        ("NVIDIA B200", BLACKWELL, True),
        ("NVIDIA GB200", BLACKWELL, True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", BLACKWELL, False),
        ("Tesla V100-SXM2-16GB", 5, False),
        ("", None, False),
    ],
)
def test_parts_that_contain_memory_errors(model, architecture, contains):
    assert facts(Gpu("GPU-a", 0, model=model, architecture=architecture)).contains_errors is contains


def test_facts_are_what_was_probed():
    limits, margins = Thresholds(95, 89), Thresholds(-8, -2)
    gpu = Gpu("GPU-a", 0, thresholds=limits, margins=margins, nvswitch=True, fields=frozenset({230}), mig_enabled=True)
    assert facts(gpu) == Facts(limits, margins, contains_errors=False, nvswitch=True, says_action=True, mig=True)
    assert facts(Gpu("GPU-b", 1)) == Facts()
