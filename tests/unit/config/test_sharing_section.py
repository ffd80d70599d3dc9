import time
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_plugin.config.document import parse
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import MPS, TIME_SLICING, DeviceChoice, MpsLimits, SharedResource

GPU = "GPU-01234567-89ab-4cde-8f01-23456789abcd"
MIG = "MIG-01234567-89ab-4cde-8f01-23456789abcd"
MPS_ROOT = {"mps_root": "/run/nvidia/mps"}


def shared(text: str, **flags: str) -> tuple[SharedResource, ...]:
    """What a file shares."""
    return resolve({**MPS_ROOT, **flags}, {}, parse(text.encode(), "f")).sharing


def faults(text: str, **flags: str) -> list[str]:
    """Return the faults of a file."""
    with pytest.raises(ConfigError) as caught:
        resolve({**MPS_ROOT, **flags}, {}, parse(text.encode(), "f"))
    return [str(fault) for fault in caught.value.faults]


def entries(*rows: str, section: str = "timeSlicing", also: str = "") -> str:
    """Return a file with these rows of one section, from line 4."""
    return f"sharing:\n  {section}:\n    resources:\n" + "".join(f"    - {{{row}}}\n" for row in rows) + also


# What is asked for

SLICED = SharedResource("nvidia.com/gpu", "nvidia.com/gpu", 2, TIME_SLICING, DeviceChoice(), False, MpsLimits())
SERVED = replace(SLICED, strategy=MPS, single_requests=True)
BY_DEFAULT = "    renameByDefault: true\n"
SINGLE = "    failRequestsGreaterThanOne: {}\n"


@pytest.mark.parametrize(
    ("row", "also", "expected"),
    [
        ("name: nvidia.com/gpu", "", SLICED),
        ("name: example.com/gpu", "", replace(SLICED, name="example.com/gpu", offered_as="example.com/gpu")),
        (
            "name: mig-1g.5gb.me",
            "",
            replace(SLICED, name="nvidia.com/mig-1g.5gb.me", offered_as="nvidia.com/mig-1g.5gb.me"),
        ),
        ("name: gpu, rename: other", "", replace(SLICED, offered_as="nvidia.com/other")),
        ("name: gpu, rename: x.y/z", BY_DEFAULT, replace(SLICED, offered_as="x.y/z")),
        ("name: gpu, rename: nvidia.com/gpu", BY_DEFAULT, SLICED),
        ("name: gpu", BY_DEFAULT, replace(SLICED, offered_as="nvidia.com/gpu.shared")),
        ("name: gpu", BY_DEFAULT.replace("true", "false"), SLICED),
        ("name: gpu", SINGLE.format("true"), replace(SLICED, single_requests=True)),
        ("name: gpu", SINGLE.format("false"), SLICED),
        ("name: gpu, devices: all", "", SLICED),
        ("name: gpu, devices: null", "", SLICED),
        ("name: gpu, devices: 3", "", replace(SLICED, devices=DeviceChoice(count=3))),
        ("name: gpu, devices: [0, '0:1', 1:2]", "", replace(SLICED, devices=DeviceChoice(0, ("0", "0:1", "1:2")))),
        (
            f"name: gpu, devices: [{GPU}, {MIG}, MIG-{GPU}/1/0]",
            "",
            replace(SLICED, devices=DeviceChoice(0, (GPU, MIG, f"MIG-{GPU}/1/0"))),
        ),
    ],
)
def test_an_entry_of_time_slicing(row, also, expected):
    assert shared(entries(f"{row}, replicas: 2", also=also)) == (expected,)


@pytest.mark.parametrize(
    ("limits", "also", "expected"),
    [
        ("{}", "", SERVED),
        ("null", SINGLE.format("true"), SERVED),
        ("null", SINGLE.format("false"), replace(SERVED, single_requests=False)),
        ("{activeThreadPercentage: 30}", "", replace(SERVED, limits=MpsLimits(30.0))),
        ("{activeThreadPercentage: 12.5, pinnedMemory: 8Gi}", "", replace(SERVED, limits=MpsLimits(12.5, 8192))),
        ("{pinnedMemory: 8192Mi}", "", replace(SERVED, limits=MpsLimits(None, 8192))),
        ("{pinnedMemory: 8}", "", replace(SERVED, limits=MpsLimits(None, 8))),
    ],
)
def test_an_entry_of_mps(limits, also, expected):
    assert shared(entries(f"name: gpu, replicas: 2, limits: {limits}", section="mps", also=also)) == (expected,)


def test_entries_keep_their_order_and_may_share_a_resources_devices_among_them():
    rows = (
        "name: gpu, replicas: 2",
        "name: gpu, replicas: 3, devices: [0, 1]",
        "name: gpu, replicas: 4, devices: [2]",
        "name: gpu, replicas: 5, devices: 2",
        "name: mig-1g.5gb, replicas: 6, devices: all",
    )
    assert [entry.replicas for entry in shared(entries(*rows))] == [2, 3, 4, 5, 6]


def test_both_strategies_may_stand_beside_each_other():
    text = entries("name: mig-1g.5gb, replicas: 2") + "  mps: {resources: [{name: gpu, replicas: 3}]}\n"
    assert [(entry.name, entry.strategy) for entry in shared(text)] == [
        ("nvidia.com/mig-1g.5gb", TIME_SLICING),
        ("nvidia.com/gpu", MPS),
    ]


@pytest.mark.parametrize("section", ["", "{}", "{timeSlicing: null}", "{mps:, timeSlicing:}"])
def test_a_section_left_empty_asks_for_nothing(section):
    assert shared(f"sharing: {section}") == ()


@pytest.mark.parametrize(("replicas", "section"), [(83886, "timeSlicing"), (48, "mps")])
def test_as_many_replicas_as_may_be(replicas, section):
    [entry] = shared(entries(f"name: gpu, replicas: {replicas}", section=section))
    assert entry.replicas == replicas


# NVIDIA's validations

VALUES = [
    ("replicas: 0", "number of replicas must be >= 1, not 0"),
    ("replicas: -3", "number of replicas must be >= 1, not -3"),
    ("replicas: '4'", "'4' is not a whole number"),
    ("replicas: 4.5", "4.5 is not a whole number"),
    ("replicas: true", "True is not a whole number"),
    ("replicas: [4]", "[4] is not a whole number"),
    (
        "replicas: 83887",
        "maximum allowed replicas exceeded: 83887 > 83886, a longer list of devices than any kubelet reads (4 MiB)",
    ),
    ("devices: most", "devices set as 'most' but the only valid string input is 'all'"),
    ("devices: ''", "devices set as '' but the only valid string input is 'all'"),
    ("devices: '3'", "devices set as '3' but the only valid string input is 'all'"),
    ("devices: 0", "devices set as '0' but a count of devices must be > 0"),
    ("devices: -1", "devices set as '-1' but a count of devices must be > 0"),
    ("devices: {a: 1}", "unrecognized type for devices spec: {'a': 1} is neither 'all' nor a count nor a list"),
    ("devices: 1.5", "unrecognized type for devices spec: 1.5 is neither 'all' nor a count nor a list"),
    ("devices: true", "unrecognized type for devices spec: True is neither 'all' nor a count nor a list"),
    ("devices: []", "devices set as an empty list: name some, or leave it out for all"),
    ("name: ''", "incorrect format for resource name 'nvidia.com/': '' is not 1 to 63 letters"),
    ("name: 3", "3 is not text"),
    ("name: [gpu]", "['gpu'] is not text"),
    ("name: a b", "incorrect format for resource name 'nvidia.com/a b': 'a b' is not 1 to 63 letters"),
    (f"name: {'g' * 64}", f"incorrect format for resource name 'nvidia.com/{'g' * 64}': '{'g' * 64}' is not 1 to 63"),
    ("name: a/b/c", "incorrect format for resource name 'a/b/c' has more than one '/'"),
    ("name: Example.com/gpu", "incorrect format for resource name 'Example.com/gpu': the domain 'Example.com' is not"),
    (
        "name: kubernetes.io/gpu",
        "incorrect format for resource name 'kubernetes.io/gpu' is in the domain kubernetes.io",
    ),
    ("rename: a b", "incorrect format for resource name 'nvidia.com/a b': 'a b' is not 1 to 63 letters"),
    ("rename: ''", "incorrect format for resource name 'nvidia.com/': '' is not 1 to 63 letters"),
]


@pytest.mark.parametrize(("written", "reason"), VALUES)
@pytest.mark.parametrize("section", ["timeSlicing", "mps"])
def test_values_that_cannot_be(section, written, reason):
    key = written.partition(":")[0]
    if section == "mps" and "83887" in written:
        reason = "maximum allowed replicas exceeded: 83887 > 48, the most clients that an MPS daemon takes"
    row = {"name": "gpu", "replicas": "2"} | {key: written.partition(": ")[2]}
    text = f"sharing:\n  {section}:\n    resources:\n    -\n" + "".join(f"      {k}: {v}\n" for k, v in row.items())
    line = 5 + [*row].index(key)
    [fault] = faults(text)
    assert fault.startswith(f"f:{line}: sharing.{section}.resources[0].{key}: {reason}")


def test_an_unsupported_item_of_a_list_is_named():
    [fault] = faults("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0,\nnull]}]}}")
    assert fault.startswith(
        "f:2: sharing.timeSlicing.resources[0].devices[1]: unsupported type for device in devices list: "
    )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        *(
            ("activeThreadPercentage", value, "is not a percentage from 1 to 100")
            for value in ("0", "0.5", "101", "'30'", "true", ".nan")
        ),
        *(
            ("pinnedMemory", value, "is not an amount of memory such as 8Gi, 8192Mi or 8192 (MiB)")
            for value in ("0", "0Gi", "-1", "8G", "1.5Gi", "1.5", "true")
        ),
        ("pinnedMemories", "1Gi", "unknown key; did you mean sharing.mps.resources[0].limits.pinnedMemory?"),
    ],
)
def test_limits_that_cannot_be(key, value, reason):
    [fault] = faults(entries(f"name: gpu, replicas: 2, limits: {{{key}: {value}}}", section="mps"))
    assert fault.startswith(f"f:4: sharing.mps.resources[0].limits.{key}: ")
    assert fault.endswith(reason)


AT = "sharing.timeSlicing.resources"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sharing:\n  timeSlicing: {}", "f:2: sharing.timeSlicing: no resources specified"),
        ("sharing:\n  mps:\n    renameByDefault: true", "f:2: sharing.mps: no resources specified"),
        ("sharing:\n  mps:\n    resources: []", "f:3: sharing.mps.resources: no resources specified"),
        ("sharing:\n  mps:\n    resources:", "f:2: sharing.mps: no resources specified"),
        (entries("name: null, replicas: 2"), f"f:4: {AT}[0]: no name specified"),
        (entries("name: gpu"), f"f:4: {AT}[0]: no replicas specified"),
        (entries("name: gpu, replicas:"), f"f:4: {AT}[0]: no replicas specified"),
        (entries("name: gpu, replicas: 2, limits: {}"), f"f:4: {AT}[0].limits: unknown key"),
        (
            entries(f"name: {'g' * 60}, replicas: 2", also=BY_DEFAULT),
            f"f:4: {AT}[0]: renamed by default, 'nvidia.com/{'g' * 60}.shared': '{'g' * 60}.shared' is not 1 to 63 letters",
        ),
        (
            entries("name: gpu, replicas: 2", "name: nvidia.com/gpu, replicas: 3"),
            f"f:5: {AT}[1].name: all devices of nvidia.com/gpu are shared by the entry at {AT}[0] (line 4) already",
        ),
        (
            entries("name: gpu, replicas: 2, devices: all", "name: gpu, replicas: 3, devices: [1]"),
            f"f:5: {AT}[1].devices: all devices of nvidia.com/gpu are in one entry and some in another, at {AT}[0] (line 4)",
        ),
        (
            entries("name: gpu, replicas: 2, devices: 3", "name: gpu, replicas: 3, devices: all"),
            f"f:5: {AT}[1].devices: all devices of nvidia.com/gpu are in one entry and some in another, at {AT}[0] (line 4)",
        ),
        (
            entries(
                f"name: gpu, replicas: 2, devices: [0, {GPU}]",
                "name: gpu, replicas: 3, devices: 2",
                f"name: gpu, replicas: 3, devices: [1, {GPU.lower().replace('gpu', 'GPU')}]",
            ),
            f"f:6: {AT}[2].devices[1]: device {GPU} of nvidia.com/gpu is in the entry at {AT}[0] (line 4) already",
        ),
        (entries('name: gpu, replicas: 2, devices: [1, 0, "01"]'), f"f:4: {AT}[0].devices[2]: device 1 appears twice"),
        (
            entries(
                "name: gpu, replicas: 2, devices: [0]",
                also="  mps: {resources: [{name: gpu, replicas: 2, devices: [1]}]}",
            ),
            f"f:5: sharing.mps.resources[0].name: nvidia.com/gpu is shared by time-slicing too, at {AT}[0] (line 4)",
        ),
        (
            entries("name: a, rename: s, replicas: 2", also="  mps: {resources: [{name: b, rename: s, replicas: 2}]}"),
            f"f:5: sharing.mps.resources[0]: nvidia.com/s is offered by time-slicing too, from nvidia.com/a at {AT}[0] (line 4)",
        ),
        *(
            (
                entries("name: a, rename: s, replicas: 2", f"name: b, rename: s, {other}", section="mps"),
                "f:5: sharing.mps.resources[1]: nvidia.com/s has other replicas or limits at sharing.mps.resources[0] (line 4)",
            )
            for other in ("replicas: 3", "replicas: 2, limits: {pinnedMemory: 8}")
        ),
    ],
)
def test_what_a_section_must_not_say(text, fault):
    [found] = faults(text)
    assert found.startswith(fault)


@pytest.mark.parametrize("strategy", ["single", "none"])
def test_mps_goes_with_whole_gpus(strategy):
    assert shared(entries("name: gpu, replicas: 2", section="mps"), mig_strategy=strategy)


def test_mps_needs_a_root_and_goes_not_with_mixed():
    text = entries("name: gpu, replicas: 2", section="mps")
    [fault] = faults(text, mig_strategy="mixed")
    assert fault == "f:2: sharing.mps: using --mig-strategy=mixed is not supported with MPS"
    [fault] = faults(text, mps_root="")
    assert fault.startswith("f:2: sharing.mps: using MPS requires --mps-root to be specified: ")
    assert shared(entries("name: gpu, replicas: 2"), mig_strategy="mixed", mps_root="")


@pytest.mark.parametrize("name", ["mig-1g.5gb", "nvidia.com/mig-1g.5gb", "example.com/mig-x", "small"])
def test_mps_does_not_share_mig_devices(name):
    also = "resources: {mig: [{pattern: 1g*, name: small}]}\n"
    assert faults(entries(f"name: {name}, replicas: 2", section="mps", also=also)) == [
        "f:4: sharing.mps.resources[0].name: sharing using MPS is not supported for MIG devices"
    ]


def test_the_plus_of_a_mig_profile_is_explained():
    assert faults(entries("name: mig-1g.5gb+me, replicas: 2"))[0].endswith(
        "the + of a MIG profile is written . in names"
    )


def test_faults_of_a_plain_mapping_have_no_lines():
    rows: list[dict[str, Any]] = [{"name": "gpu", "replicas": 2}, {"name": "gpu", "replicas": 2}]
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, {"sharing": {"timeSlicing": {"resources": rows}}})
    assert str(caught.value) == (
        f"config file: {AT}[1].name: all devices of nvidia.com/gpu are shared by the entry at {AT}[0] already"
    )


@pytest.mark.parametrize(
    "rows",
    [
        [f"{{name: r{n}, replicas: 2}}" for n in range(1000)],
        [f"{{name: gpu, replicas: 2, devices: [{n}]}}" for n in range(1000)],
        [f"{{name: gpu, replicas: 2, devices: [{', '.join(map(str, range(n, 18000, 2)))}]}}" for n in (0, 1)],
    ],
    ids=["names", "entries", "devices"],
)
def test_a_long_section_is_judged_in_a_moment(rows):
    document = parse(f"sharing: {{timeSlicing: {{resources: [{', '.join(rows)}]}}}}".encode(), "f")
    began = time.process_time()
    assert len(resolve({}, {}, document).sharing) == len(rows)
    assert time.process_time() - began < 2


def test_more_entries_than_any_node_has_devices_are_refused():
    rows = ", ".join(f"{{name: r{n}, replicas: 2}}" for n in range(1001))
    [fault] = faults(f"sharing:\n  timeSlicing:\n    resources: [{rows}]")
    assert "sharing.timeSlicing.resources[1000]: more than 1000 entries" in fault


@pytest.mark.parametrize("section", ["timeSlicing", "mps"])
def test_one_replica_means_not_shared_and_is_said(section):
    also = "    renameByDefault: true\n"
    text = entries("name: gpu, devices: [0], replicas: 1", "name: gpu, replicas: 4", section=section, also=also)
    settings = resolve(MPS_ROOT, {}, parse(text.encode(), "f"))
    [fault] = settings.without_effect
    assert str(fault).startswith(f"f:4: sharing.{section}.resources[0].replicas: ")
    alone, others = settings.sharing
    assert (alone.replicas, alone.offered_as, alone.devices.listed) == (1, "nvidia.com/gpu", ("0",))
    assert (others.replicas, others.offered_as) == (4, "nvidia.com/gpu.shared")


def test_one_client_of_mps_needs_no_mps():
    [entry] = shared(entries("name: gpu, replicas: 1", section="mps"), mps_root="")
    assert entry.strategy == TIME_SLICING
