import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.devices.gpu_names import matches, means, selected, unmatched
from gpu_plugin.devices.node import Gpu

H100 = Gpu("GPU-a", 0, pci_bus_id="00000000:1B:00.0", model="NVIDIA H100 80GB HBM3")
H200 = Gpu("GPU-b", 1, pci_bus_id="00000000:43:00.0", model="NVIDIA H200")
FAR = Gpu("GPU-c", 12, pci_bus_id="00010000:43:00.0", model="NVIDIA A100-SXM4-40GB")
GPUS = (H100, H200, FAR)


@pytest.mark.parametrize(
    ("item", "gpu"),
    [
        ("0", H100),
        ("12", FAR),
        ("GPU-b", H200),
        ("00000000:43:00.0", H200),
        ("0000:43:00.0", H200),
        ("10000:43:00.0", FAR),
        ("0000:1b:00.0", H100),
        ("NVIDIA H200", H200),
        ("*A100*", FAR),
        ("NVIDIA H1*", H100),
    ],
)
def test_an_item_means_one_gpu_and_no_other(item, gpu):
    assert [other for other in GPUS if means(item, other)] == [gpu]


@pytest.mark.parametrize("item", ["1b", "3", "GPU-", "NVIDIA", "H200", "0000:43:00.1", "nvidia h200"])
def test_an_item_that_means_none(item):
    assert selected(GPUS, (item,), ()) == []
    assert unmatched(GPUS, [item]) == [item]


def test_nothing_included_is_everything():
    assert selected(GPUS, (), ()) == list(GPUS)


def test_what_is_excluded_is_out_even_if_it_is_included():
    assert selected(GPUS, ("NVIDIA*",), ("1",)) == [H100, FAR]
    assert selected(GPUS, ("1",), ("GPU-b",)) == []


def test_a_pattern_is_text_but_for_its_stars():
    assert matches("a.c", "a.c")
    assert not matches("abc", "a.c")
    assert matches("", "*")
    assert matches("anything (at all)", "any*(*)")
    assert not matches("NVIDIA H100 PCIe", "NVIDIA H100")
    assert not matches("a\nb", "a")
    assert matches("a[b]?!", "a[b]?*")
    assert not matches("ab", "a?")
    assert not matches("ab", "a[b]")


@given(st.text("ab*?[]!", max_size=12), st.text("ab?[]!", max_size=12))
def test_a_pattern_describes_what_a_regular_expression_of_it_does(pattern, text):
    expression = ".*".join(map(re.escape, pattern.split("*")))
    assert matches(text, pattern) == bool(re.fullmatch(expression, text))


@pytest.mark.parametrize("pattern", ["*" * 16 + "x", "*N" * 128 + "x", "*a*b*c" * 40 + "#", "*" * 256 + "#"])
def test_no_pattern_takes_longer_than_a_moment(pattern):
    began = time.process_time()
    assert not any(matches(model, pattern) for model in [H100.model, "N" * 96, "abc" * 32] * 100)
    assert time.process_time() - began < 0.5
