"""The metrics of a whole node, and of any status, read by the parsers of Prometheus' client library."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.runtime.histogram import Histogram
from gpu_plugin.status import model
from gpu_plugin.telemetry.metrics.exposition import OPENMETRICS, PROMETHEUS, labelled, lines, wanted
from gpu_plugin.telemetry.metrics.families import families, metrics
from gpu_plugin.telemetry.metrics.gpus import ORDER_SIGNALS
from tests.unit.status.sample import COUNTERS, GPUS, RESOURCE, STATUS, gpu, signal

HOSTILE = 'a"b\\c\nd{e}=f,# HELP g\n"} 1'


def text(status, form, held=(), **more):
    made = families(status, held, **more)
    return "".join(f"{line}\n" for family in made for line in lines(family, form)) + form.end


def read(status, held=(), **more):
    """Every sample by name and labels, by both parsers, which must agree."""
    plain = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in prometheus(text(status, PROMETHEUS, held, **more))
        for sample in family.samples
    }
    told = read_once(status, held, **more)
    assert plain == told
    return told


def read_once(status, held=(), **more):
    """Every sample by name and labels, by the stricter parser alone."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in openmetrics.text_string_to_metric_families(text(status, OPENMETRICS, held, **more))
        for sample in family.samples
    }


def value(status, name, **labels):
    return read(status).get((name, frozenset(labels.items())))


# Formats


def test_lines_are_as_prometheus_has_them():
    shown = metrics(STATUS)
    at = shown.index("# TYPE gpu_plugin_gpu_info gauge")
    assert shown[at - 1] == "# HELP gpu_plugin_gpu_info Description of a GPU."
    uuid = 'uuid="GPU-0",index="0"'
    assert shown[at + 1] == (
        f'gpu_plugin_gpu_info{{{uuid},pci_bus_id="0000:10:00.0",model="NVIDIA H100",driver="580.1"}} 1'
    )
    assert "# TYPE gpu_plugin_config_reloads_total counter" in shown


def test_openmetrics_names_families_without_their_endings_and_says_their_units():
    shown = text(STATUS, OPENMETRICS, lag=Histogram((0.5,)).as_data()).splitlines()
    assert "# TYPE gpu_plugin_gpu info" in shown
    assert "# TYPE gpu_plugin_config_reloads counter" in shown
    assert "# UNIT gpu_plugin_event_loop_lag_seconds seconds" in shown
    assert 'gpu_plugin_event_loop_lag_seconds_bucket{le="+Inf"} 0' in shown
    assert shown[-1] == "# EOF"
    assert shown.count("# EOF") == 1


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", PROMETHEUS),
        ("*/*", PROMETHEUS),
        ("text/html,application/xhtml+xml,*/*;q=0.8", PROMETHEUS),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", OPENMETRICS),
        ('application/openmetrics-text;version="1.0.0"', OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.5", PROMETHEUS),
        ("application/openmetrics-text;version=2.0.0", PROMETHEUS),
        ("application/openmetrics-text;q=0", PROMETHEUS),
        ("application/openmetrics-text;q=nonsense", PROMETHEUS),
        ("text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0;q=0.1", PROMETHEUS),
        # Prometheus 2.53, and 3.x with the escaping that it would rather have
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.5", OPENMETRICS),
    ],
)
def test_openmetrics_is_for_who_asks_for_it(accept, form):
    assert wanted(accept) is form


def test_labels_are_escaped_as_both_formats_read_them_back():
    assert labelled(a=HOSTILE) == r'a="a\"b\\c\nd{e}=f,# HELP g\n\"} 1"'
    hostile = replace(STATUS, resources={HOSTILE: STATUS.resources[RESOURCE]})
    assert value(hostile, "gpu_plugin_devices", resource=HOSTILE, state="healthy") == 6
    assert labelled(a="\ud800") == 'a="?"', "what is not text in UTF-8 stops no scrape"


# What is said


def test_every_family_is_in_the_table_and_the_other_way_round():
    table = Path("docs/metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(gpu_plugin_\w+)` \|", table, re.MULTILINE))
    assert {_name(family) for family in families(FULL, **MORE)} == named
    types = dict(re.findall(r"^\| `(gpu_plugin_\w+)` \| (\w+)", table, re.MULTILINE))
    assert {_name(family): family.kind for family in families(FULL, **MORE)} == types


def test_every_label_is_in_the_table():
    documented = {}
    for section in Path("docs/metrics.md").read_text(encoding="utf-8").split("\n## "):
        of_gpu = {"uuid", "index"} if section.startswith(("GPUs", "Readings")) else set()
        for name, labels in re.findall(r"^\| `(gpu_plugin_\w+)` \| [^|]* \| ([^|]*)\|", section, re.MULTILINE):
            documented[name] = of_gpu | set(re.findall(r"`(\w+)`", labels))
    for name, labels in read(FULL, **MORE):
        family = re.sub("_(bucket|sum|count)$", "", name)
        assert {label for label, _ in labels} <= documented[family] | {"le"}, name


def _name(family):
    return family.name + {"counter": "_total", "info": "_info"}.get(family.kind, "")


def test_what_gpu_plugin_mps_counts_is_a_counter_for_each_resource():
    counts = {"nvidia.com/gpu": {"limits_restored": 2, "probes_failed": 5}}
    status = replace(STATUS, counters=replace(COUNTERS, mps=counts))
    assert value(status, "gpu_plugin_mps_limits_restored_total", resource="nvidia.com/gpu") == 2
    assert value(status, "gpu_plugin_mps_probes_failed_total", resource="nvidia.com/gpu") == 5


def test_xids_of_the_table_begin_at_0_and_others_come_as_they_are_met():
    known = replace(COUNTERS, xid_classes={"13": "application", "79": "reboot", "31": "application"})
    status = replace(STATUS, counters=known)
    one = {"uuid": "GPU-1", "index": "1"}
    assert value(status, "gpu_plugin_xid_errors_total", **one, xid="79", **{"class": "reboot"}) == 0
    assert value(status, "gpu_plugin_xid_errors_total", **one, xid="31", **{"class": "application"}) == 300
    assert sum(name == "gpu_plugin_xid_errors_total" for name, _ in read(status)) == 3 * 4
    gone = (*known.xids, {"uuid": "GPU-9", "xid": 999, "class": "unlisted", "total": 1, "first": 1e9})
    status = replace(STATUS, counters=replace(known, xids=gone))
    labels = {"uuid": "GPU-9", "index": "", "xid": "999", "class": "unlisted"}
    assert value(status, "gpu_plugin_xid_errors_total", **labels) == 1
    assert value(status, "gpu_plugin_gpu_xid_first_timestamp_seconds", **labels) == 1e9


def test_a_gpu_that_an_operator_alone_holds_back_is_told_apart():
    ordered = gpu(3, state="held-back", healthy=False, held_back=("node-cordon",))
    status = replace(STATUS, gpus=(*GPUS[:3], ordered))
    told = {by: value(status, "gpu_plugin_gpu_held_back", uuid="GPU-3", index="3", by=by) for by in ORDER_SIGNALS}
    assert told == {"cordon": 0, "node-cordon": 1, "maintenance": 0}
    assert value(status, "gpu_plugin_gpu_held_back", uuid="GPU-1", index="1", by="node-cordon") == 0


def test_each_fault_has_its_xid_and_remedy_and_orders_are_no_faults():
    some = (
        signal("cordoned", "FATAL", "cordon", action="lift it"),
        signal("Xid 79", "FATAL", action="reboot", xid=79),
        signal("Xid 95", "FATAL", action="reset", xid=95),
        signal("down", "FATAL", "nvlink", action="reset"),
        signal("down", "DEGRADED", "nvlink", action="of another MIG device", device="MIG-1"),
        signal("Xid 13", "APP", action="nothing", xid=13),
    )
    told = read(replace(STATUS, gpus=(gpu(3, signals=some),)))
    of = {"uuid": "GPU-3", "index": "3"}
    assert {labels: worst for (name, labels), worst in told.items() if name == "gpu_plugin_gpu_fault"} == {
        frozenset({**of, "signal": "xid", "xid": "79", "action": "reboot"}.items()): 3,
        frozenset({**of, "signal": "xid", "xid": "95", "action": "reset"}.items()): 3,
        frozenset({**of, "signal": "nvlink", "xid": "", "action": "reset"}.items()): 3,
    }


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"state": "held-back", "healthy": False, "verdict": "FATAL"}, "unhealthy"),
        ({"state": "unhealthy", "healthy": False, "verdict": "FATAL"}, "unhealthy"),
        ({"state": "degraded", "verdict": "FATAL"}, "degraded"),  # of a MIG device
        ({"state": "withheld", "verdict": "DEGRADED"}, "degraded"),
        ({"state": "withheld"}, "healthy"),
    ],
)
def test_the_health_of_a_gpu_is_its_health_for_the_kubelet(more, state):
    status = replace(STATUS, gpus=(gpu(0, **more),))
    states = ("healthy", "degraded", "unhealthy")
    told = {each: value(status, "gpu_plugin_gpu_health", uuid="GPU-0", index="0", state=each) for each in states}
    assert told == {**dict.fromkeys(states, 0), state: 1}


def test_each_signal_has_its_worst_verdict():
    some = (signal("a", "FATAL"), signal("b", "APP"), signal("c", "DEGRADED", "nvlink"))
    status = replace(STATUS, gpus=(gpu(3, signals=some),))
    told = {
        dict(labels)["signal"]: at
        for (name, labels), at in read(status).items()
        if name == "gpu_plugin_gpu_signal_verdict"
    }
    assert told == {**dict.fromkeys(SIGNALS, 0), "xid": 3, "nvlink": 2}


def test_a_reading_that_is_not_known_has_no_series():
    readings = {"temperature_celsius": 0, "power_watts": None, "nvlinks_active": None}
    names = {name for name, _ in read(replace(STATUS, gpus=(gpu(0, readings=readings),)))}
    assert "gpu_plugin_gpu_temperature_celsius" in names
    assert not {name for name in names if name.startswith(("gpu_plugin_gpu_power", "gpu_plugin_gpu_nvlinks"))}


def test_an_action_that_is_newer_than_the_table_is_told_by_its_number():
    status = replace(STATUS, gpus=(gpu(0, readings={"recovery_action": "9", "fabric": "failed"}),))
    one = {"uuid": "GPU-0", "index": "0"}
    assert value(status, "gpu_plugin_gpu_recovery_action", **one, action="9") == 1
    assert value(status, "gpu_plugin_gpu_recovery_action", **one, action="none") == 0
    assert value(status, "gpu_plugin_gpu_fabric_state", **one, state="failed") == 1
    assert value(status, "gpu_plugin_gpu_fabric_state", **one, state="completed") == 0


def test_pods_are_named_whatever_they_are_called():
    held = [({"resource": "r", "device": "GPU-0::1", "uuid": "GPU-0", "index": 0}, [(HOSTILE, "größe-0", "main")])]
    labels = {"namespace": HOSTILE, "pod": "größe-0", "container": "main", "resource": "r", "device": "GPU-0::1"}
    status = replace(STATUS, pods=model.Pods(requests=7, failures=2))
    key = "gpu_plugin_pod_device", frozenset({**labels, "uuid": "GPU-0", "index": "0"}.items())
    assert read(status, held)[key] == 1
    assert value(status, "gpu_plugin_pod_attribution_up") == 1
    assert value(status, "gpu_plugin_pod_resources_requests_total", result="answered") == 5
    down = replace(STATUS, pods=model.Pods(trouble="no socket", requests=7, failures=7))
    assert value(down, "gpu_plugin_pod_attribution_up") == 0
    assert value(STATUS, "gpu_plugin_pod_attribution_up") is None


def test_durations_are_counted_up_from_bucket_to_bucket():
    lag = Histogram((0.001, 0.5))
    for seconds in (0.0, 0.001, 0.002, 7.0):
        lag.observe(seconds)
    told = {(name, dict(labels).get("le")): at for (name, labels), at in read(STATUS, lag=lag.as_data()).items()}
    name = "gpu_plugin_event_loop_lag_seconds"
    assert [told[f"{name}_bucket", le] for le in ("0.001", "0.5", "+Inf")] == [2, 3, 4]
    assert told[f"{name}_count", None] == 4
    assert math.isclose(told[f"{name}_sum", None], 7.003)


def _calls(**calls):
    return {call: {"seconds": Histogram((1.0,)).as_data(), "errors": {"unknown": 1}, "hung": 0} for call in calls}


FULL = replace(
    STATUS,
    cdi=model.Cdi(directory="/var/run/cdi", devices=17),
    pods=model.Pods(requests=1),
    counters=replace(
        COUNTERS,
        kubelet={"methods": _calls(Allocate=1), "resources": {}},
        nvml={"calls": _calls(temperature=1), "hanging": 0},
    ),
)
"""A status with every part."""

HELD = [({"resource": "r", "device": "d", "uuid": "GPU-0", "index": 0}, [("n", "p", "c")])]
MORE: dict[str, Any] = {"held": HELD, "lag": Histogram((1.0,)).as_data(), "scrape_seconds": 0.004}


# Any status

_text = st.text(max_size=12)
_counts = st.integers(0, 10**15)
_number = st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**15), st.floats(0, 1e12, allow_nan=False))


@st.composite
def statuses(draw):
    uuids = draw(st.lists(_text.filter(bool), max_size=3, unique=True))
    gpus = tuple(
        model.Gpu(
            uuid=uuid,
            index=index,
            bus_id=draw(_text),
            model=draw(_text),
            healthy=draw(st.booleans()),
            verdict=draw(st.sampled_from(["OK", "DEGRADED", "FATAL"])),
            since=draw(st.one_of(st.none(), st.floats(0, 4e9))),
            signals=tuple(
                signal(draw(_text), draw(st.sampled_from(["APP", "DEGRADED", "FATAL"])), name)
                for name in draw(st.lists(st.sampled_from([*SIGNALS, "later"]), max_size=3))
            ),
            readings=draw(st.dictionaries(st.sampled_from(sorted(READ)), _number)),
        )
        for index, uuid in enumerate(uuids)
    )
    resources = draw(
        st.dictionaries(_text, st.builds(model.Resource, devices=_counts, healthy=_counts, retired=_counts))
    )
    held = [
        (
            {"resource": resource, "device": device, "uuid": draw(_text), "index": 0},
            sorted(draw(st.sets(st.tuples(_text, _text, _text), max_size=2))),
        )
        for resource, device in draw(st.sets(st.tuples(_text, _text), max_size=3))
    ]
    assert FULL.counters is not None
    counters = replace(
        FULL.counters,
        supported={uuid: {"xid": draw(st.booleans())} for uuid in uuids},
        transitions=tuple({"uuid": uuid, "signal": draw(_text), "verdict": "FATAL", "total": 1} for uuid in uuids),
        xids=tuple(
            {"uuid": uuid, "xid": 79, "class": draw(_text), "total": draw(_counts), "first": 1.0} for uuid in uuids
        ),
        xid_classes={"79": "reboot", "13": "application"},
    )
    driver = model.Driver(version=draw(_text), trouble=draw(_text), answered=draw(st.booleans()))
    pods = model.Pods(trouble=draw(_text), requests=1)
    return replace(FULL, driver=driver, resources=resources, gpus=gpus, pods=pods, counters=counters), held


READ = frozenset(
    {
        *("at", "temperature_celsius", "power_watts", "energy_joules", "utilization_ratio", "memory_used_bytes"),
        *("ecc_uncorrected", "sram_threshold", "remap_pending", "nvlinks_active", "pcie_replays", "slowdown_celsius"),
    }
)


@given(statuses())
def test_any_status_gives_text_that_can_be_read(drawn):
    read(*drawn)
