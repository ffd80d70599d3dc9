"""Requests are read strictly: a field that reaches beyond its message, or is of another type, is no field of ours."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.kubelet import pod_listing, wire
from gpu_plugin.kubelet.pod_listing import decode_allocated

ids = st.lists(st.text(max_size=70), max_size=6)


@given(st.lists(ids, max_size=4))
def test_what_is_asked_for_is_read_as_it_was_written(containers):
    written = wire.messages.AllocateRequest([wire.messages.ContainerAllocateRequest(each) for each in containers])
    assert wire.decode_allocate(bytes(written)) == containers


@given(ids, ids, st.integers(-(2**31), 2**31 - 1))
def test_a_preference_is_read_as_it_was_written(available, must, size):
    container = wire.messages.ContainerPreferredAllocationRequest(available, must, size)
    [read] = wire.decode_preferred(bytes(wire.messages.PreferredAllocationRequest([container])))
    assert (read.available, read.must_include, read.size) == (available, must, size)


def nested(data: bytes, key: int = 0x0A) -> bytes:
    return bytes((key, len(data))) + data


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (b"\x0a\x50" + b"x" * 42, "80 bytes where 42 are left"),
        (b"\x09" + b"GPU-text", "field 1 is not text"),  # fixed64
        (b"\x0d" + b"GPU-", "field 1 is not text"),  # fixed32
        (b"\x08\x07", "field 1 is not text"),
        (b"\x09GPU", "8 bytes where 3 are left"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x02\x00", "the number 0"),
        (b"\x0a", "within a number"),
        (b"\x0a\x01\xff", "decode"),
        (b"\x80" * 11, "more than ten bytes"),
    ],
)
@pytest.mark.parametrize("decode", [wire.decode_allocate, wire.decode_preferred])
def test_a_container_that_is_none_is_refused(decode, container, words):
    with pytest.raises(ValueError, match=words):
        decode(nested(container))
    with pytest.raises(ValueError, match=words):
        wire.decode_pre_start(container)


def test_a_message_that_is_none_is_refused():
    with pytest.raises(ValueError, match="field 1 is not a message"):
        wire.decode_allocate(b"\x08\x07")
    with pytest.raises(ValueError, match="field 3 is not a number"):
        wire.decode_preferred(nested(nested(b"8", 0x1A)))


@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_read_or_refused(data):
    for decode in (wire.decode_allocate, wire.decode_preferred, wire.decode_pre_start, decode_allocated):
        with suppress(ValueError):
            assert decode(data) is not None


def test_an_answer_with_more_devices_than_a_node_has_is_refused(monkeypatch):
    monkeypatch.setattr(pod_listing, "MAX_HELD", 3)
    devices = [("nvidia.com/gpu", f"GPU-{at}", ()) for at in range(4)]
    answer = wire.encode_pod_resources([wire.PodListing("p", "n", {"c": devices})])
    with pytest.raises(ValueError, match="more than 3 devices"):
        decode_allocated(answer)
