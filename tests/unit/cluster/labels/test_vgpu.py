"""Whether a PCI device is a vGPU, by its configuration space."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.cluster.labels.values import VgpuHost, vgpu_host

FIRST, SECOND = 0x60, 0xD0
HOST = b"\0\x16" + b"460.16".ljust(10, b"\0") + b"r460_00".ljust(10, b"\0")


def space(capability, *, listed=True, first=FIRST):
    """A configuration space with power management, and behind it this vendor-specific capability."""
    config = bytearray(256)
    config[0:4] = b"\xde\x10\xb8\x1e"
    config[0x06] = 0x10 if listed else 0
    config[0x34] = first
    config[FIRST : FIRST + 3] = bytes((0x01, SECOND, 8))
    config[SECOND : SECOND + 3 + len(capability)] = bytes((0x09, 0x00, 3 + len(capability))) + capability
    return bytes(config)


def test_a_vgpu_says_which_driver_its_host_has():
    assert vgpu_host(space(b"VF" + HOST)) == VgpuHost("460.16", "r460_00")
    assert vgpu_host(space(b"VF" + b"\x01\x04ab" + HOST)) == VgpuHost("460.16", "r460_00")  # behind another record


@pytest.mark.parametrize("records", [b"", HOST[:-1], b"\x01\x00" + HOST, b"\x01\x7f"])
def test_a_vgpu_that_does_not_say_so_is_one_all_the_same(records):
    assert vgpu_host(space(b"VF" + records)) == VgpuHost()


@pytest.mark.parametrize(
    "config",
    [
        b"",
        space(b"VF" + HOST)[:64],  # as the kernel shows it to those without privileges
        space(b"VF" + HOST, listed=False),
        space(b"PF" + HOST),
        space(b""),
        space(b"VF" + HOST, first=0),
        space(b"VF" + HOST, first=0xFF),
        b"\0" * 256,
        bytes(range(256)),
    ],
)
def test_any_other_device_is_none(config):
    assert vgpu_host(config) is None


def test_a_list_that_leads_back_to_itself_ends():
    config = bytearray(space(b"VF"))
    config[FIRST + 1] = FIRST
    assert vgpu_host(bytes(config)) is None


@given(st.binary(min_size=256, max_size=256))
def test_any_bytes_are_read(config):
    told = vgpu_host(config[:6] + b"\x10" + config[7:])
    assert told is None or len(told.version) <= 10
