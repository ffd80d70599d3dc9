import re

import pytest

from gpu_plugin.config.device_names import listed_device, selected_gpu, selected_gpus
from gpu_plugin.config.values import ItemError

UUID = "01234567-89ab-4cde-8f01-23456789abcd"
GPU = f"GPU-{UUID}"


def test_the_forms_of_a_listed_device():
    forms: dict[str, list[object]] = {
        "0": [0, "0", "00"],
        "12": [12],
        "0:1": ["0:1", "00:01"],
        GPU: [GPU, f"GPU-{UUID.upper()}"],
        f"MIG-{UUID}": [f"MIG-{UUID}"],
        f"MIG-{GPU}/9/0": [f"MIG-{GPU}/9/0"],
    }
    for name, each in forms.items():
        assert [listed_device(written) for written in each] == [name] * len(each)
    texts = ["", "-1", "x", "0:", ":1", "0:1:2", "all", "GPU-", "٣", "1234567890", UUID, f"{GPU}0", f"{GPU}\n"]
    texts += [f"{GPU}::0", f"MIG-{GPU}", f"MIG-{GPU}/1", f"MIG-{UUID}/1/0"]
    others: list[object] = [-1, 1.5, True, None, [], {}]
    for wrong in (*texts, *others):
        with pytest.raises(ValueError, match=r"^unsupported type for device in devices list: "):
            listed_device(wrong)


def test_the_forms_of_a_selected_gpu():
    forms: dict[str, list[object]] = {
        "3": [3, "03"],
        GPU: [GPU, f"gpu-{UUID.upper()}"],
        "00000000:3b:00.0": ["00000000:3B:00.0"],
        "0000:3b:00.0": ["0000:3b:00.0"],
        "*H100*": ["*H100*"],
        "NVIDIA H100 80GB HBM3": ["NVIDIA H100 80GB HBM3", " NVIDIA H100 80GB HBM3 "],
        "*": ["*"],
    }
    for name, each in forms.items():
        assert [selected_gpu(written) for written in each] == [name] * len(each)


@pytest.mark.parametrize(
    ("reason", "each"),
    [
        ("is not a GPU index", [-1, True, 1.0, None, "", "  "]),
        ("is not a GPU index: GPU indices count from 0", ["-1", "1.0", "9" * 20]),
        ("is not GPU- and a uuid", ["GPU-1234", f"{GPU}x"]),
        ("is a MIG device: name the GPU that it is on", [f"MIG-{UUID}"]),
        ("is not a PCI bus id such as", ["3b:00.0", "0:1", "0000:3b:00.9"]),
        ("is not text in one line", ["a\nb"]),
        ("is a pattern of 256 characters; at most 255 are allowed", ["*" * 256]),
    ],
)
def test_what_is_no_selected_gpu(reason, each):
    for written in each:
        with pytest.raises(ValueError, match=re.escape(reason)):
            selected_gpu(written)


def test_selected_gpus_are_text_or_a_list_each_once():
    assert selected_gpus("") == selected_gpus([]) == ()
    assert selected_gpus("0, 1,,*T4*") == ("0", "1", "*T4*")
    assert selected_gpus(2) == ("2",)
    assert selected_gpus([0, "1", "00"]) == ("0", "1")
    assert selected_gpus(["A, B*"]) == ("A, B*",)
    with pytest.raises(ItemError, match="count from 0") as caught:
        selected_gpus([0, "*", "-3"])
    assert caught.value.index == 2
    others: list[object] = [None, {}, 1.5, True]
    for wrong in others:
        with pytest.raises(ValueError, match="is not a GPU index"):
            selected_gpus(wrong)
