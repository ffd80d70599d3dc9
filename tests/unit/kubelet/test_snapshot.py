import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.containers.cdi.readiness import CdiReadiness
from gpu_plugin.containers.edits import Access
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.health.latch import Health, LatchKey, Verdict
from gpu_plugin.kubelet.snapshot import Hardware, ResourceView, SnapshotStore
from gpu_plugin.placement.subsets import Placement

NAME = "nvidia.com/gpu"


def view(*ids: str, name: str = NAME) -> ResourceView:
    """A resource with devices of these ids."""
    return ResourceView.of(
        Resource(name, tuple(Device(i, f"GPU-{i}", f"GPU-{i}", "0") for i in ids)), Access(), Placement()
    )


def test_a_device_is_found_by_its_id_and_knows_its_place():
    seen = view("b", "a", "c")
    assert seen.order == {"b": 0, "a": 1, "c": 2}
    assert seen.device("a") is seen.resource.devices[1]
    assert seen.device("x") is None


def test_hardware_that_is_in_no_resource_is_published_beside_them_and_leaves_them_the_very_same():
    store, lost = SnapshotStore(), Health(((LatchKey("lost"), Verdict.FATAL),), "it is lost")
    first = store.publish({NAME: view("a")}, {uuid: Hardware(uuid, "0") for uuid in ("GPU-a", "GPU-b")})
    assert store.publish({NAME: first.resources[NAME]}, {**first.hardware}) is first
    second = store.publish(first.resources, {**first.hardware, "GPU-b": Hardware("GPU-b", "0", lost)})
    assert (second.version, second.resources is first.resources) == (2, True)
    verdicts = [each.hardware["GPU-b"].health.verdict for each in (first, second)]
    assert verdicts == [Verdict.OK, Verdict.FATAL]
    third = store.publish({NAME: view("c")})
    assert (third.version, third.hardware is second.hardware) == (3, True)


def test_what_keeps_a_device_from_containers_is_known_also_where_its_hardware_is_unhealthy():
    one = replace(view("a"), access=Access(imex_channels=(0,)))
    ready = CdiReadiness({"GPU-a": frozenset()}, trouble="", others=frozenset(one.access.cdi_others))
    mps = replace(one.resource.devices[0], sharing=SharedResource(NAME, NAME, 2, MPS))
    views = [
        replace(one, cdi=ready),
        replace(one, cdi=replace(ready, trouble="broken")),
        replace(one, cdi=replace(ready, others=frozenset())),
        replace(one, resource=Resource(NAME, (mps,)), mps_down="its daemon is down"),
    ]
    whys = [
        "",
        "broken",
        f"no written CDI specification has {one.access.cdi_others[0]}",
        "its daemon is down",
    ]
    for reason in ("", "cordoned"):
        devices = [each.with_reasons({"GPU-a": reason}).resource.devices[0] for each in views]
        assert [device.reason for device in devices] == [reason or why for why in whys]
        assert [each.unreachable(device) for each, device in zip(views, devices, strict=True)] == whys


def test_an_id_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match=r"^nvidia\.com/gpu: a device id occurs twice$"):
        view("a", "b", "a")


def test_an_id_longer_than_the_api_allows_is_refused():
    assert view("a" * 63).order == {"a" * 63: 0}
    with pytest.raises(ValueError, match="has more than 63 characters"):
        view("a", "b" * 64)


def test_reasons_change_the_devices_they_name_and_leave_the_others_the_very_same():
    before = view("a", "b", "c")
    after = before.with_reasons({"GPU-b": "too hot", "GPU-c": "", "GPU-x": "lost"})
    assert [device.reason for device in after.resource.devices] == ["", "too hot", ""]
    assert after.resource.devices[0] is before.resource.devices[0]
    assert after.resource.devices[2] is before.resource.devices[2]
    assert before.resource.devices[1].healthy
    assert (after.order, after.access, after.placement) == (before.order, before.access, before.placement)


@pytest.mark.parametrize("reasons", [{}, {"GPU-a": ""}, {"GPU-x": "lost"}, {"GPU-b": "hot"}])
def test_reasons_that_change_nothing_give_the_very_same_view(reasons):
    before = view("a", "b").with_reasons({"GPU-b": "hot"})
    assert before.with_reasons(reasons) is before


async def test_the_version_rises_with_each_change_and_only_then():
    store = SnapshotStore()
    first = view("a")
    assert store.publish({NAME: first}).version == 1
    assert store.publish({NAME: first}).version == 1
    assert store.publish({NAME: first.with_reasons({"GPU-a": ""})}).version == 1
    assert store.publish({NAME: first.with_reasons({"GPU-a": "hot"})}).version == 2
    assert store.publish({NAME: first, "nvidia.com/other": view("b", name="nvidia.com/other")}).version == 3
    assert store.publish({NAME: first}).version == 4
    assert store.current.resources == {NAME: first}


async def test_that_there_is_nothing_is_news_the_first_time():
    store = SnapshotStore()
    assert store.publish({}).version == 1
    assert store.publish({}).version == 1


async def test_a_snapshot_does_not_change_with_the_mapping_it_was_made_of():
    store = SnapshotStore()
    mine = {NAME: view("a")}
    published = store.publish(mine)
    mine.clear()
    assert list(published.resources) == [NAME]
    assert store.publish({}) is not published


async def test_what_changes_nothing_wakes_nobody():
    store = SnapshotStore()
    first = view("a")
    store.publish({NAME: first})
    woken: list[bool] = []

    async def wait() -> None:
        await store.changed.wait()
        woken.append(True)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            store.publish({NAME: first})
            await anyio.wait_all_tasks_blocked()
            assert woken == []
            store.publish({NAME: view("a", "b")})
    assert woken == [True]
