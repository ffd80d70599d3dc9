import time
from typing import Any

import pytest

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


def test_one_entry():
    assert shared(entries("name: nvidia.com/gpu, replicas: 4")) == (
        SharedResource("nvidia.com/gpu", "nvidia.com/gpu", 4, TIME_SLICING, DeviceChoice(), False, MpsLimits()),
    )


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("gpu", "nvidia.com/gpu"),
        ("nvidia.com/gpu", "nvidia.com/gpu"),
        ("example.com/gpu", "example.com/gpu"),
        ("mig-1g.5gb.me", "nvidia.com/mig-1g.5gb.me"),
    ],
)
def test_a_name_without_a_domain_gets_nvidias(written, name):
    [entry] = shared(entries(f"name: {written}, replicas: 2"))
    assert (entry.name, entry.offered_as) == (name, name)
    [entry] = shared(entries(f"name: a, rename: {written}, replicas: 2"))
    assert (entry.name, entry.offered_as) == ("nvidia.com/a", name)


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ("", "nvidia.com/gpu"),
        ("renameByDefault: false", "nvidia.com/gpu"),
        ("renameByDefault: true", "nvidia.com/gpu.shared"),
        ("renameByDefault: true, rename: x.y/z", "x.y/z"),
        ("rename: nvidia.com/gpu, renameByDefault: true", "nvidia.com/gpu"),
    ],
)
def test_the_name_it_is_offered_under(options, offered):
    rename = next((part for part in options.split(", ") if part.startswith("rename:")), "replicas: 2")
    default = next((part for part in options.split(", ") if "Default" in part), "renameByDefault: false")
    row = "{name: gpu, replicas: 2}" if rename == "replicas: 2" else f"{{name: gpu, replicas: 2, {rename}}}"
    [entry] = shared(f"sharing: {{timeSlicing: {{{default}, resources: [{row}]}}}}")
    assert entry.offered_as == offered


@pytest.mark.parametrize(
    ("section", "written", "single"),
    [
        ("timeSlicing", None, False),
        ("timeSlicing", "true", True),
        ("timeSlicing", "false", False),
        ("mps", None, True),
        ("mps", "true", True),
        ("mps", "false", False),
    ],
)
def test_whether_more_than_one_may_be_asked_for(section, written, single):
    option = f"failRequestsGreaterThanOne: {written}, " if written else ""
    [entry] = shared(f"sharing: {{{section}: {{{option}resources: [{{name: gpu, replicas: 2}}]}}}}")
    assert entry.single_requests is single


@pytest.mark.parametrize(
    ("written", "choice"),
    [
        ("all", DeviceChoice()),
        ("null", DeviceChoice()),
        ("3", DeviceChoice(count=3)),
        ("[0, 2]", DeviceChoice(listed=("0", "2"))),
        ('["0", "0:1", 1:2]', DeviceChoice(listed=("0", "0:1", "1:2"))),
        (f"[{GPU}, {MIG}, MIG-{GPU}/1/0]", DeviceChoice(listed=(GPU, MIG, f"MIG-{GPU}/1/0"))),
    ],
)
def test_which_devices(written, choice):
    [entry] = shared(entries(f"name: gpu, replicas: 2, devices: {written}"))
    assert entry.devices == choice


@pytest.mark.parametrize(
    ("written", "limits"),
    [
        ("{}", MpsLimits()),
        ("null", MpsLimits()),
        ("{activeThreadPercentage: 30}", MpsLimits(30.0)),
        ("{activeThreadPercentage: 12.5, pinnedMemory: 8Gi}", MpsLimits(12.5, 8192)),
        ("{pinnedMemory: 8192Mi}", MpsLimits(None, 8192)),
        ("{pinnedMemory: 100}", MpsLimits(None, 100)),
    ],
)
def test_the_limits_of_mps_clients(written, limits):
    [entry] = shared(entries(f"name: gpu, replicas: 2, limits: {written}", section="mps"))
    assert (entry.strategy, entry.limits) == (MPS, limits)


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


# NVIDIA's validations


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sharing:\n  timeSlicing: {}", "f:2: sharing.timeSlicing: no resources specified"),
        ("sharing:\n  mps:\n    renameByDefault: true", "f:2: sharing.mps: no resources specified"),
        ("sharing:\n  mps:\n    resources: []", "f:3: sharing.mps.resources: no resources specified"),
        ("sharing:\n  mps:\n    resources:", "f:2: sharing.mps: no resources specified"),
        (entries("replicas: 2"), "f:4: sharing.timeSlicing.resources[0]: no name specified"),
        (entries("name: null, replicas: 2"), "f:4: sharing.timeSlicing.resources[0]: no name specified"),
        (entries("name: gpu"), "f:4: sharing.timeSlicing.resources[0]: no replicas specified"),
        (entries("name: gpu, replicas:"), "f:4: sharing.timeSlicing.resources[0]: no replicas specified"),
    ],
)
def test_what_must_not_be_missing(text, fault):
    assert faults(text) == [fault]


@pytest.mark.parametrize("section", [None, "{}", "{timeSlicing: null}", "{mps:, timeSlicing:}"])
def test_a_section_left_empty_asks_for_nothing(section):
    assert shared(f"sharing: {section or ''}") == ()


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


@pytest.mark.parametrize("item", ["x", "-1", "1.5", "true", "{a: 1}", "[0]", "null", "GPU-x", "all"])
def test_an_unsupported_item_of_a_list_is_named(item):
    text = (
        "sharing:\n  timeSlicing:\n    resources:\n    - name: gpu\n      replicas: 2\n"
        f"      devices:\n      - 0\n      - {item}\n"
    )
    [fault] = faults(text)
    assert fault.startswith(
        "f:8: sharing.timeSlicing.resources[0].devices[1]: unsupported type for device in devices list: "
    )


def test_a_mig_profiles_plus_is_no_part_of_a_name():
    [fault] = faults(entries("name: mig-1g.5gb+me, replicas: 2"))
    assert fault.endswith("; the + of a MIG profile is written . in names")


def test_a_name_that_the_suffix_makes_too_long():
    text = f"sharing:\n  mps:\n    renameByDefault: true\n    resources:\n    - {{name: {'g' * 60}, replicas: 2}}\n"
    [fault] = faults(text)
    assert fault.startswith(f"f:5: sharing.mps.resources[0]: renamed by default, 'nvidia.com/{'g' * 60}.shared': ")


@pytest.mark.parametrize(("replicas", "section"), [(83886, "timeSlicing"), (2, "timeSlicing"), (48, "mps"), (2, "mps")])
def test_as_many_replicas_as_may_be(replicas, section):
    [entry] = shared(entries(f"name: gpu, replicas: {replicas}", section=section))
    assert entry.replicas == replicas


def test_more_replicas_than_an_mps_daemon_has_clients():
    assert faults(entries("name: gpu, replicas: 49", section="mps")) == [
        (
            "f:4: sharing.mps.resources[0].replicas: "
            "maximum allowed replicas exceeded: 49 > 48, the most clients that an MPS daemon takes"
        )
    ]


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("activeThreadPercentage: 0", "0 is not a percentage from 1 to 100"),
        ("activeThreadPercentage: 0.5", "0.5 is not a percentage from 1 to 100"),
        ("activeThreadPercentage: 101", "101 is not a percentage from 1 to 100"),
        ("activeThreadPercentage: '30'", "'30' is not a percentage from 1 to 100"),
        ("activeThreadPercentage: true", "True is not a percentage from 1 to 100"),
        ("activeThreadPercentage: .nan", "nan is not a percentage from 1 to 100"),
        ("pinnedMemory: 8", None),
        ("pinnedMemory: 0", "0 is not an amount of memory"),
        ("pinnedMemory: 0Gi", "'0Gi' is not an amount of memory"),
        ("pinnedMemory: -1", "-1 is not an amount of memory"),
        ("pinnedMemory: 8G", "'8G' is not an amount of memory"),
        ("pinnedMemory: 1.5Gi", "'1.5Gi' is not an amount of memory"),
        ("pinnedMemory: 1.5", "1.5 is not an amount of memory"),
        ("pinnedMemory: true", "True is not an amount of memory"),
        ("pinnedMemories: 1Gi", "unknown key; did you mean sharing.mps.resources[0].limits.pinnedMemory?"),
    ],
)
def test_limits_that_cannot_be(written, reason):
    text = entries(f"name: gpu, replicas: 2, limits: {{{written}}}", section="mps")
    if reason is None:
        assert shared(text)
        return
    [fault] = faults(text)
    assert fault.startswith(f"f:4: sharing.mps.resources[0].limits.{written.partition(':')[0]}: {reason}")


def test_limits_are_for_mps_alone():
    assert faults(entries("name: gpu, replicas: 2, limits: {}")) == [
        "f:4: sharing.timeSlicing.resources[0].limits: unknown key"
    ]


# Contradictions


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (
            ("name: gpu, replicas: 2", "name: nvidia.com/gpu, replicas: 3"),
            (
                "f:5: sharing.timeSlicing.resources[1].name: all devices of nvidia.com/gpu are shared by the entry at "
                "sharing.timeSlicing.resources[0] (line 4) already"
            ),
        ),
        (
            ("name: gpu, replicas: 2, devices: all", "name: gpu, replicas: 3, devices: [1]"),
            (
                "f:5: sharing.timeSlicing.resources[1].devices: all devices of nvidia.com/gpu are in one entry and some in "
                "another, at sharing.timeSlicing.resources[0] (line 4); leave out 'all' for the rest"
            ),
        ),
        (
            ("name: gpu, replicas: 2, devices: 3", "name: gpu, replicas: 3, devices: all"),
            (
                "f:5: sharing.timeSlicing.resources[1].devices: all devices of nvidia.com/gpu are in one entry and some in "
                "another, at sharing.timeSlicing.resources[0] (line 4); leave out 'all' for the rest"
            ),
        ),
        (
            (
                f"name: gpu, replicas: 2, devices: [0, {GPU}]",
                "name: gpu, replicas: 3, devices: 2",
                f"name: gpu, replicas: 3, devices: [1, {GPU.lower().replace('gpu', 'GPU')}]",
            ),
            (
                f"f:6: sharing.timeSlicing.resources[2].devices[1]: device {GPU} of nvidia.com/gpu is in the entry at "
                "sharing.timeSlicing.resources[0] (line 4) already"
            ),
        ),
        (
            ('name: gpu, replicas: 2, devices: [1, 0, "01"]',),
            "f:4: sharing.timeSlicing.resources[0].devices[2]: device 1 appears twice",
        ),
    ],
)
def test_entries_that_want_the_same_devices(rows, fault):
    assert faults(entries(*rows)) == [fault]


def test_one_resource_shared_both_ways():
    text = entries(
        "name: gpu, replicas: 2, devices: [0]", also="  mps:\n    resources: [{name: gpu, replicas: 2, devices: [1]}]\n"
    )
    assert faults(text) == [
        (
            "f:6: sharing.mps.resources[0].name: nvidia.com/gpu is shared by time-slicing too, at "
            "sharing.timeSlicing.resources[0] (line 4): a resource is shared by time-slicing or mps"
        )
    ]


def test_one_name_offered_both_ways():
    text = entries(
        "name: a, rename: s, replicas: 2", also="  mps:\n    resources: [{name: b, rename: s, replicas: 2}]\n"
    )
    assert faults(text) == [
        (
            "f:6: sharing.mps.resources[0]: nvidia.com/s is offered by time-slicing too, from nvidia.com/a at "
            "sharing.timeSlicing.resources[0] (line 4); rename one of them"
        )
    ]


@pytest.mark.parametrize("strategy", ["single", "none"])
def test_mps_goes_with_whole_gpus(strategy):
    assert shared(entries("name: gpu, replicas: 2", section="mps"), mig_strategy=strategy)


def test_mps_does_not_go_with_mixed():
    assert faults(entries("name: gpu, replicas: 2", section="mps"), mig_strategy="mixed") == [
        "f:2: sharing.mps: using --mig-strategy=mixed is not supported with MPS"
    ]
    assert shared(entries("name: gpu, replicas: 2"), mig_strategy="mixed")


def test_mps_needs_a_root():
    assert faults(entries("name: gpu, replicas: 2", section="mps"), mps_root="") == [
        "f:2: sharing.mps: using MPS requires --mps-root to be specified: the host directory in which clients find the MPS daemon"
    ]
    written = {"flags": {"mpsRoot": "/a"}, "sharing": {"mps": {"resources": [{"name": "gpu", "replicas": 2}]}}}
    assert resolve({}, {}, written).sharing


@pytest.mark.parametrize("name", ["mig-1g.5gb", "nvidia.com/mig-1g.5gb", "example.com/mig-x", "small"])
def test_mps_does_not_share_mig_devices(name):
    also = "resources: {mig: [{pattern: 1g*, name: small}]}\n"
    assert faults(entries(f"name: {name}, replicas: 2", section="mps", also=also)) == [
        "f:4: sharing.mps.resources[0].name: sharing using MPS is not supported for MIG devices"
    ]


def test_faults_of_a_plain_mapping_have_no_lines():
    rows: list[dict[str, Any]] = [{"name": "gpu", "replicas": 2}, {"name": "gpu", "replicas": 2}]
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, {"sharing": {"timeSlicing": {"resources": rows}}})
    assert str(caught.value) == (
        "config file: sharing.timeSlicing.resources[1].name: all devices of nvidia.com/gpu are shared by the entry at "
        "sharing.timeSlicing.resources[0] already"
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
    text = entries("name: gpu, replicas: 1", section="mps")
    assert [entry.strategy for entry in resolve({}, {}, parse(text.encode(), "f")).sharing] != [MPS]
