import pytest

from gpu_plugin.config.device_names import listed_device, selected_gpu, selected_gpus
from gpu_plugin.config.values import ItemError

UUID = "01234567-89ab-4cde-8f01-23456789abcd"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (0, "0"),
        (12, "12"),
        ("0", "0"),
        ("07", "7"),
        ("0:1", "0:1"),
        ("00:01", "0:1"),
        (f"GPU-{UUID}", f"GPU-{UUID}"),
        (f"GPU-{UUID.upper()}", f"GPU-{UUID}"),
        (f"MIG-{UUID}", f"MIG-{UUID}"),
        (f"MIG-GPU-{UUID}/9/0", f"MIG-GPU-{UUID}/9/0"),
    ],
)
def test_the_forms_of_a_listed_device(written, name):
    assert listed_device(written) == name


@pytest.mark.parametrize(
    "written",
    [
        -1,
        1.5,
        True,
        None,
        [],
        {},
        "",
        "-1",
        "x",
        "0:",
        ":1",
        "0:1:2",
        "all",
        UUID,
        "GPU-",
        f"GPU-{UUID}0",
        f"GPU-{UUID}\n",
        f"GPU-{UUID}::0",
        f"MIG-GPU-{UUID}",
        f"MIG-GPU-{UUID}/1",
        f"MIG-{UUID}/1/0",
        "٣",
        "1234567890",
    ],
)
def test_what_is_no_listed_device(written):
    with pytest.raises(ValueError, match=r"^unsupported type for device in devices list: "):
        listed_device(written)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (3, "3"),
        ("03", "3"),
        (f"GPU-{UUID}", f"GPU-{UUID}"),
        (f"gpu-{UUID.upper()}", f"GPU-{UUID}"),
        ("00000000:3B:00.0", "00000000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("*H100*", "*H100*"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        (" Tesla T4 ", "Tesla T4"),
        ("*", "*"),
    ],
)
def test_the_forms_of_a_selected_gpu(written, name):
    assert selected_gpu(written) == name


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (-1, "is not a GPU index"),
        (True, "is not a GPU index"),
        (1.0, "is not a GPU index"),
        (None, "is not a GPU index"),
        ("", "is not a GPU index"),
        ("  ", "is not a GPU index"),
        ("-1", "is not a GPU index: GPU indices count from 0"),
        ("1.0", "is not a GPU index: GPU indices count from 0"),
        ("9" * 20, "is not a GPU index: GPU indices count from 0"),
        ("GPU-1234", "is not GPU- and a uuid"),
        (f"GPU-{UUID}x", "is not GPU- and a uuid"),
        (f"MIG-{UUID}", "is a MIG device: name the GPU that it is on"),
        ("3b:00.0", "is not a PCI bus id such as"),
        ("0:1", "is not a PCI bus id such as"),
        ("0000:3b:00.9", "is not a PCI bus id such as"),
        ("a\nb", "is not text in one line"),
        ("*" * 256, "is a pattern of 256 characters; at most 255 are allowed"),
    ],
)
def test_what_is_no_selected_gpu(written, reason):
    with pytest.raises(ValueError, match=reason):
        selected_gpu(written)


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("", ()),
        ("0, 1,,*T4*", ("0", "1", "*T4*")),
        (2, ("2",)),
        ([0, "1", "00"], ("0", "1")),
        (["A, B*"], ("A, B*",)),
        ([], ()),
    ],
)
def test_selected_gpus_are_text_or_a_list_each_once(written, names):
    assert selected_gpus(written) == names


def test_the_item_of_a_list_that_is_to_blame_is_told():
    with pytest.raises(ItemError, match="count from 0") as caught:
        selected_gpus([0, "*", "-3"])
    assert caught.value.index == 2


@pytest.mark.parametrize("written", [None, {}, 1.5, True])
def test_what_is_no_list_of_gpus(written):
    with pytest.raises(ValueError, match="is not a GPU index"):
        selected_gpus(written)
