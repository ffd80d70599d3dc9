"""Requests with fields of another type are refused. Answers are encoded as one message of betterproto would be."""

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from demo.stand_in_kubelet.pod_resources import encode_pods
from gpu_plugin.containers.edits import ContainerEdits, DeviceSpec, Mount
from gpu_plugin.devices.device import Device
from gpu_plugin.kubelet import messages, pod_listing, wire
from gpu_plugin.kubelet.pod_listing import decode_holders
from tests.unit.kubelet.serving import devices

ids = st.lists(st.text(max_size=70), max_size=6)


@given(st.lists(ids, min_size=1, max_size=4))
def test_what_is_asked_for_is_read_as_it_was_written(containers):
    written = messages.AllocateRequest([messages.ContainerAllocateRequest(each) for each in containers])
    assert wire.decode_allocate(bytes(written)) == containers


@given(ids, ids, st.integers(-(2**31), 2**31 - 1))
def test_a_preference_is_read_as_it_was_written(available, must, size):
    container = messages.ContainerPreferredAllocationRequest(available, must, size)
    [read] = wire.decode_preferred(bytes(messages.PreferredAllocationRequest([container])))
    assert (read.available_device_ids, read.must_include_device_ids, read.allocation_size) == (available, must, size)


def test_other_fields_are_passed_over_and_ids_before_the_start_are_read():
    assert wire.decode_allocate(b"\x0a\x05\x0a\x01a\x50\x07\x7a\x01x") == [["a"]]
    assert wire.decode_pre_start(bytes(messages.PreStartContainerRequest(["a", "b"]))) == ["a", "b"]


@pytest.mark.parametrize("decode", [wire.decode_allocate, wire.decode_preferred])
def test_a_request_with_more_containers_than_any_kubelet_sends_is_refused_at_once(decode):
    assert len(decode(nested(b"") * wire.MAX_CONTAINERS)) == wire.MAX_CONTAINERS
    for count in (wire.MAX_CONTAINERS + 1, 100_000):
        began = time.monotonic()
        with pytest.raises(wire.TooLargeError, match="more than 64 containers"):
            decode(nested(b"") * count)
        assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("most", [9, 12])
def test_the_ids_of_all_containers_count_together(monkeypatch, most):
    monkeypatch.setattr(wire, "MAX_IDS", most)
    monkeypatch.setattr(wire, "MAX_CONTAINERS", 2)
    five = [f"GPU-{at}" for at in range(5)]
    given = bytes(messages.AllocateRequest([messages.ContainerAllocateRequest(five)] * 2))
    asked = messages.ContainerPreferredAllocationRequest(five[:3], five[3:], 1)
    for decode, request in (
        (wire.decode_allocate, given),
        (wire.decode_preferred, bytes(messages.PreferredAllocationRequest([asked] * 2))),
    ):
        if most == 12:  # the size of a preference counts, too
            assert len(decode(request)) == 2
        else:
            with pytest.raises(wire.TooLargeError, match="more than 9 device ids"):
                decode(request)


texts = st.text(max_size=200)
some = st.text(min_size=1, max_size=200)


@given(texts, texts)
def test_a_registration_is_written_as_the_generated_messages_have_it(endpoint, resource):
    options = messages.DevicePluginOptions(False, True)
    assert wire.encode_options(pre_start=False, preferred=True) == bytes(options)
    whole = messages.RegisterRequest("v1beta1", endpoint, resource, options)
    assert wire.encode_register(endpoint, resource) == bytes(whole)


listed = st.builds(
    lambda identifier, numa, reason: Device(identifier, "GPU-1", "GPU-1", "0", numa=tuple(numa), reason=reason),
    st.text(max_size=300),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.sampled_from(["", "lost"]),
)


@given(st.lists(listed, max_size=4))
def test_a_list_is_written_as_the_generated_messages_have_it(found):
    whole = []
    for device in found:
        whole.append(messages.Device(device.id, "Unhealthy" if device.reason else "Healthy"))
        if device.numa:
            whole[-1].topology = messages.TopologyInfo([messages.NumaNode(node) for node in device.numa])
    assert wire.ListEncoder().encode(found) == bytes(messages.ListAndWatchResponse(whole))


def test_numa_node_zero_is_sent_and_unknown_is_not():
    known = devices(1)[0]
    assert wire.ListEncoder().encode([known]).endswith(b"\x1a\x02\x0a\x00")
    assert wire.ListEncoder().encode([replace(known, numa=())]).endswith(b"Healthy")


def test_an_encoder_follows_changes_of_health_order_and_length():
    encoder = wire.ListEncoder()
    one, two, three = devices(3)
    before = encoder.encode((one, two, three))
    assert encoder.encode((one, three, two)) == before, "the order has no meaning to the kubelet"
    sick = replace(three, reason="sick")
    for listed in ((one, sick, two), (one, two, three), (two, three)):
        assert encoder.encode(listed) == wire.ListEncoder().encode(listed)
    assert encoder.fresh((two, sick)) == 1


@given(
    st.dictionaries(some, texts, max_size=3),
    st.lists(st.builds(Mount, texts, texts, st.booleans()), max_size=3),
    st.lists(st.builds(DeviceSpec, texts, texts, texts), max_size=3),
    st.dictionaries(some, texts, max_size=3),
    st.lists(texts, max_size=3),
)
def test_an_allocation_is_written_as_the_generated_messages_have_it(envs, mounts, devices, annotations, names):
    edits = ContainerEdits(envs, tuple(mounts), tuple(devices), annotations, tuple(names))
    whole = messages.ContainerAllocateResponse(
        envs,
        [messages.Mount(each.container_path, each.host_path, each.read_only) for each in mounts],
        [messages.DeviceSpec(each.container_path, each.host_path, each.permissions) for each in devices],
        annotations,
        [messages.CdiDevice(name) for name in names],
    )
    assert wire.encode_allocate([edits, edits]) == bytes(messages.AllocateResponse([whole, whole]))


@given(st.lists(ids, max_size=4))
def test_a_preference_is_answered_as_the_generated_messages_have_it(answers):
    whole = [messages.ContainerPreferredAllocationResponse(each) for each in answers]
    assert wire.encode_preferred(answers) == bytes(messages.PreferredAllocationResponse(whole))


def nested(data: bytes, key: int = 0x0A) -> bytes:
    return bytes((key, len(data))) + data


@pytest.mark.parametrize(
    "container",
    [
        b"\x09" + b"GPU-text",  # fixed64
        b"\x0d" + b"GPU-",  # fixed32
        b"\x08\x07",  # a number
        b"\x09GPU",
        b"\x0a\x01\xff",  # not UTF-8
        b"\x80" * 11,
    ],
)
@pytest.mark.parametrize("decode", [wire.decode_allocate, wire.decode_preferred])
def test_a_damaged_container_is_refused(decode, container):
    with pytest.raises(ValueError, match="message"):
        decode(nested(container))


def test_a_damaged_request_is_refused():
    with pytest.raises(ValueError, match="AllocateRequest message"):
        wire.decode_allocate(b"\x08\x07")
    with pytest.raises(ValueError, match="PreferredAllocationRequest message"):
        wire.decode_preferred(nested(b"\x10\x07"))


@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_read_or_refused(data):
    for decode in (wire.decode_allocate, wire.decode_preferred, wire.decode_pre_start, decode_holders):
        with suppress(ValueError):
            assert decode(data) is not None


def test_an_answer_with_more_devices_than_a_node_has_is_refused(monkeypatch):
    monkeypatch.setattr(pod_listing, "MAX_HELD", 3)
    devices = [("nvidia.com/gpu", f"GPU-{at}", ()) for at in range(4)]
    answer = encode_pods({"p": {"c": devices}})
    with pytest.raises(ValueError, match="more than 3 devices"):
        decode_holders(answer)
