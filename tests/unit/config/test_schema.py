import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpu_plugin.config.document import Place, parse, spell
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.written import written
from tests.unit.config.written_files import contents

BOUNDED = hypothesis_settings(max_examples=40, deadline=None)


def faults(text: str) -> list[str]:
    """Return the faults of a file."""
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, parse(text.encode(), "f"))
    return [str(fault) for fault in caught.value.faults]


def mappings(value: Any, place: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every mapping in a content, with its place."""
    if isinstance(value, dict):
        yield place, value
        for key, inner in value.items():
            yield from mappings(inner, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from mappings(item, (*place, index))


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    """Return the places of all single values of keys."""
    for where, mapping in mappings(value, place):
        yield from ((*where, key) for key, inner in mapping.items() if not isinstance(inner, dict | list))


def line_of(text: str, mark: str) -> int:
    """The one line that holds a mark."""
    [line] = [number for number, line in enumerate(text.splitlines(), 1) if mark in line]
    return line


@BOUNDED
@given(contents(), st.booleans())
def test_what_is_written_out_again_asks_for_the_same(content, flow):
    text = yaml.safe_dump(content, default_flow_style=flow)
    settings = resolve({}, {}, parse(text.encode(), "f"))
    assert resolve({}, {}, content) == settings
    again = yaml.safe_dump(written(settings))
    assert resolve({}, {}, parse(again.encode(), "f")) == settings


@BOUNDED
@given(contents(), st.data(), st.sampled_from([None, 1, "x", [], {}]))
def test_an_unknown_key_anywhere_is_refused_with_its_path_and_line(content, data, value):
    changed = copy.deepcopy(content)
    place, holder = data.draw(st.sampled_from([*mappings(changed)]))
    holder["unheardOf"] = value
    text = yaml.safe_dump(changed)
    [fault] = faults(text)
    number = "; an Xid is a number such as 79" if place == ("health", "xid") else ""
    assert fault == f"f:{line_of(text, 'unheardOf')}: {spell((*place, 'unheardOf'))}: unknown key{number}"


@BOUNDED
@given(contents(), st.data())
def test_a_value_that_cannot_be_is_told_with_its_path_and_line(content, data):
    changed = copy.deepcopy(content)
    places = [*leaves(changed)]
    if not places:
        return
    place = data.draw(st.sampled_from(places))
    holder: Any = changed
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = {"unheardOf": 1}
    text = yaml.safe_dump(changed)
    told = faults(text)
    # The key is on the line before the mapping.
    assert f"f:{line_of(text, 'unheardOf') - 1}: {spell(place)}: " in "\n".join(told)
    assert all(fault.startswith("f:") for fault in told)


@pytest.mark.parametrize(("section", "other"), [("timeSlicing", "mps"), ("mps", "timeSlicing")])
def test_a_key_of_the_same_section_is_meant(section, other):
    rows = {name: {"resources": [{"name": name, "replicas": 2}]} for name in (section, other)}
    rows[section]["resources"][0]["renamebydefault"] = True
    [fault] = faults(yaml.safe_dump({"sharing": rows, "flags": {"mpsRoot": "/run/mps"}}))
    assert fault.endswith(f"did you mean sharing.{section}.renameByDefault?")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "sharing:\n  failRequestsGreaterThanOne: true\n  timeSlicing: {resources: [{name: gpu, replicas: 2}]}",
            "f:2: sharing.failRequestsGreaterThanOne: unknown key; did you mean sharing.timeSlicing.failRequestsGreaterThanOne?",
        ),
        (
            "renameByDefault: true",
            "f:1: renameByDefault: unknown key; did you mean sharing.timeSlicing.renameByDefault?",
        ),
        ("Sharing_: {}", "f:1: Sharing_: unknown key; did you mean sharing?"),
        ("sharings: {}", "f:1: sharings: unknown key; did you mean sharing?"),
        ("migStrategy: none", "f:1: migStrategy: unknown key; did you mean flags.migStrategy?"),
        (
            "flags:\n  passDeviceSpecs: true",
            "f:2: flags.passDeviceSpecs: unknown key; did you mean flags.plugin.passDeviceSpecs?",
        ),
        (
            "flags:\n  plugin:\n    mig-strategy: none",
            "f:3: flags.plugin.mig-strategy: unknown key; did you mean flags.migStrategy?",
        ),
        ("flags:\n  MIG_STRATEGY: none", "f:2: flags.MIG_STRATEGY: unknown key; did you mean flags.migStrategy?"),
        ("flags:\n  gfd:\n    one-shot: true", "f:3: flags.gfd.one-shot: unknown key; did you mean flags.gfd.oneshot?"),
        (
            "sharing:\n  mps:\n    resource: []\n    resources: [{name: x, replicas: 2}]\nflags: {mpsRoot: /a}",
            "f:3: sharing.mps.resource: unknown key; did you mean sharing.mps.resources?",
        ),
        (
            "resources:\n  gpus:\n    - name: a\n      patterns: b\n      pattern: b",
            "f:4: resources.gpus[0].patterns: unknown key; did you mean resources.gpus[0].pattern?",
        ),
        ("resources:\n  gpu: []", "f:2: resources.gpu: unknown key; did you mean resources.gpus?"),
        ("selection:\n  includes: 1", "f:2: selection.includes: unknown key; did you mean selection.include?"),
        (
            "imex:\n  channelIds: []\n  channelIDs: []",
            "f:2: imex.channelIds: unknown key; did you mean imex.channelIDs?",
        ),
        (
            "Flags:\n  Plugin:\n    deviceidstrategy: x",
            "f:3: flags.plugin.deviceIDStrategy: 'x' is not one of uuid, index",
        ),
        ("flags.migStrategy: none", "f:1: flags.migStrategy: unknown key; nest mappings instead of writing dots"),
        ("zzz: 1", "f:1: zzz: unknown key"),
        ("'': 1", "f:1: '': unknown key"),
        ("resources: [1]", "f:1: resources: a mapping is needed here, not [1]"),
        ("resources:\n  gpus: {pattern: a}", "f:2: resources.gpus: a list is needed here, not {'pattern': 'a'}"),
        ("resources:\n  gpus:\n    - a", "f:3: resources.gpus[0]: a mapping is needed here, not 'a'"),
        ("resources:\n  gpus:\n    -", "f:3: resources.gpus[0]: a mapping is needed here, not None"),
        ("sharing: true", "f:1: sharing: a mapping is needed here, not True"),
        ("sharing:\n  mps: 3", "f:2: sharing.mps: a mapping is needed here, not 3"),
        ("resources:\n  mig:\n    - {name: a}", "f:3: resources.mig[0]: no pattern specified"),
        ("resources:\n  mig:\n    - {name: a, pattern: ''}", "f:3: resources.mig[0].pattern: no pattern specified"),
        ("resources:\n  gpus:\n    - {pattern: a}", "f:3: resources.gpus[0]: no name specified"),
        (
            "resources:\n  gpus:\n    - {pattern: 3, name: a}",
            "f:3: resources.gpus[0].pattern: 3 is not text in one line",
        ),
        (
            "resources:\n  gpus:\n    - {pattern: a*, name: a}\n    - {pattern: a*, name: b}",
            "f:4: resources.gpus[1].pattern: the pattern 'a*' is already listed above; the first that matches counts",
        ),
        ("flags:\n  gfd:\n    oneshot: [1]", "f:3: flags.gfd.oneshot: [1] is not a single value"),
        ("flags:\n  useNodeFeatureAPI: 3", "f:2: flags.useNodeFeatureAPI: 3 is neither true nor false"),
        (
            "selection:\n  include:\n    - 0\n    - GPU-1",
            "f:4: selection.include[1]: 'GPU-1' is not GPU- and a uuid, as nvidia-smi -L prints it",
        ),
        ("health: fatal", "f:1: health: a mapping is needed here, not 'fatal'"),
        ("health:\n  xid: [79]", "f:2: health.xid: a mapping is needed here, not [79]"),
        ("health:\n  xid:\n    ecc: fatal", "f:3: health.xid.ecc: unknown key; an Xid is a number such as 79"),
        ("health:\n  xid:\n    079: fatal", "f:3: health.xid.079: unknown key; an Xid is a number such as 79"),
        ("health:\n  xid:\n    -1: fatal", "f:3: health.xid.-1: unknown key; an Xid is a number such as 79"),
        (
            "health:\n  xid:\n    4294967296: fatal",
            "f:3: health.xid.4294967296: unknown key; an Xid is a number such as 79",
        ),
        (
            "health:\n  xid:\n    79: fatal\n    48: bad",
            "f:4: health.xid.48: 'bad' is not one of ignore, app, degraded, fatal",
        ),
        ("health:\n  xid:\n    79: fatal\n    79: app", "f:4: health.xid.79: appears twice, first on line 3"),
        (
            "health:\n  signals: {nvlink: app}",
            "f:2: health.signals.nvlink: 'app' is not one of ignore, degraded, fatal",
        ),
        ("health:\n  signals: {xid: fatal}", "f:2: health.signals.xid: unknown key; did you mean health.xid?"),
        ("health:\n  signals: {lost: ignore}", "f:2: health.signals.lost: unknown key"),
    ],
)
def test_what_a_file_must_not_say(text, fault):
    assert faults(text) == [fault]


def test_all_faults_are_told_in_the_order_of_their_lines():
    text = (
        "sharing:\n  timeSlicing:\n    resources:\n"
        "      - {names: gpu, replicas: 0}\n      - {name: gpu, replicas: 2, devices: 0}\n"
        "flags:\n  migStrategy: x\n  plugin: {y: 1}\nimex: {channelIDs: [1]}\nversion: v2\n"
    )
    assert [(fault.split(": ")[0], fault.split(": ")[1]) for fault in faults(text)] == [
        ("f:4", "sharing.timeSlicing.resources[0].names"),
        ("f:4", "sharing.timeSlicing.resources[0].replicas"),
        ("f:4", "sharing.timeSlicing.resources[0]"),
        ("f:5", "sharing.timeSlicing.resources[1].devices"),
        ("f:7", "flags.migStrategy"),
        ("f:8", "flags.plugin.y"),
        ("f:9", "imex.channelIDs"),
        ("f:10", "version"),
    ]


def test_a_long_value_is_cut_in_what_is_told():
    [fault] = faults(f"flags:\n  stateDir: {'x' * 100_000}\n")
    assert len(fault) < 500


def test_many_faults_take_no_time_to_find():
    text = "".join(f"migStrateg{number}: 1\n" for number in range(5000))
    told = faults(text)
    assert len(told) == 5000
    assert [fault.endswith("did you mean flags.migStrategy?") for fault in told] == [True] * 20 + [False] * 4980


def test_a_letter_is_true_or_false_where_nothing_else_can_be_meant_and_text_elsewhere():
    text = "flags: {failOnInitError: n, gdsEnabled: Y}\nresources: {gpus: [{pattern: N, name: y}]}"
    settings = resolve({}, {}, parse(text.encode(), "f"))
    assert (settings.fail_on_init_error, settings.gds_enabled) == (False, True)
    assert [(each.pattern, each.name) for each in settings.gpu_names] == [("N", "nvidia.com/y")]
    with pytest.raises(ConfigError, match="'y' is neither true nor false"):
        resolve({}, {"FAIL_ON_INIT_ERROR": "y"})


def test_keys_are_read_in_any_case_as_nvidias_reader_does():
    text = "Sharing: {timeslicing: {Resources: [{Name: gpu, REPLICAS: 2}]}}\nhealth: {xidclass: {Application: ignore}}"
    settings = resolve({}, {}, parse(text.encode(), "f"))
    assert (len(settings.sharing), settings.verdicts.xid_class) == (1, {"application": "ignore"})
