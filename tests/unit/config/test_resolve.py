from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpu_plugin.config.choices import MIG_STRATEGIES
from gpu_plugin.config.device_names import selected_gpus
from gpu_plugin.config.document import parse
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import chosen, resolve
from gpu_plugin.config.settings import DEFAULTS, OPTIONS, Option, Settings
from gpu_plugin.config.values import boolean, path, text
from gpu_plugin.config.written import differing
from tests.unit.config.written_files import forms

BOUNDED = hypothesis_settings(max_examples=40, deadline=None)

# Values that an option needs
BESIDE: dict[str, dict[str, object]] = {"config_file_srcdir": {"node_name": "node-a"}}

KUBELET = "/var/lib/kubelet/device-plugins"
WITH_FILE = [option for option in OPTIONS if option.file]


def each(options: Iterable[Option]) -> pytest.MarkDecorator:
    """One test for each of these options."""
    return pytest.mark.parametrize("option", options, ids=lambda option: option.name)


def in_file(key: str, value: object) -> dict[str, Any]:
    """The file that holds one value."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def got(option: Option, flag: str | None = None, env: str | None = None, file: object = None) -> object:
    """What one option becomes."""
    return getattr(
        resolve(
            BESIDE.get(option.name, {}) | {option.name: flag},
            {} if env is None else {option.envs[0]: env},
            None if file is None else in_file(option.file, file),
        ),
        option.name,
    )


# Precedence


@each(OPTIONS)
def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(option):
    one, other = forms(option)[:2]
    default = None if option.default is None else option.parse(option.default)
    assert option.parse(one) != option.parse(other)
    assert got(option) == default
    for wanted, beaten in ((one, other), (other, one)):
        value = option.parse(wanted)
        assert got(option, env=wanted) == value
        if option.flags:
            assert got(option, flag=wanted, env=beaten) == value
        if option.file:
            assert got(option, file=wanted) == value
            assert got(option, env=wanted, file=beaten) == value
        if option.flags and option.file:
            assert got(option, flag=wanted, file=beaten) == value


@each(OPTIONS)
def test_null_in_the_file_and_an_empty_environment_variable_count_as_not_set(option):
    if option.file:
        default = None if option.default is None else option.parse(option.default)
        assert getattr(resolve({}, {}, in_file(option.file, None)), option.name) == default
    if option.name != "kubelet_socket":
        assert got(option, env="") == got(option)
        if option.file:
            written = forms(option)[0]
            assert got(option, env="", file=written) == option.parse(written)


@each([option for option in OPTIONS if len(option.envs) > 1])
def test_the_first_environment_name_wins_over_the_later_ones(option):
    one, other = forms(option)[:2]
    first, second = option.envs
    assert getattr(resolve({}, {first: one, second: other}), option.name) == one
    assert getattr(resolve({}, {second: other}), option.name) == other
    assert getattr(resolve({}, {first: "", second: other}), option.name) == other


def test_an_empty_kubelet_socket_counts_as_set():
    assert resolve({}, {"KUBELET_SOCKET": ""}).registration_socket == ""
    assert resolve({"kubelet_socket": ""}, {"KUBELET_SOCKET": "/a/kubelet.sock"}).registration_socket == ""


@pytest.mark.parametrize(
    ("name", "limits", "beyond"),
    [
        ("health_poll_interval", ("50ms", "1h"), ("49ms", "3601s")),
        ("temperature_recovery", ("0s", "24h"), ("86401s",)),
        ("nvml_timeout", ("100ms", "1h"), ("99ms", "3601s")),
        ("flap_guard", ("0s", "24h"), ("86401s",)),
        ("vanished_gpu_retention", ("1s", "720h"), ("999ms", "2592001s")),
    ],
)
def test_the_limits_of_durations(name, limits, beyond):
    for written in limits:
        resolve({name: written}, {})
    for written in beyond:
        with pytest.raises(ConfigError, match=f"{written}' is not between "):
            resolve({name: written}, {})


# What files hand over


@pytest.mark.parametrize("version", ["v2", "V1", 1, [], {}])
def test_a_file_of_another_version_is_refused(version):
    with pytest.raises(ConfigError, match=r"^config file: version: unknown version .*; this plugin reads v1$"):
        resolve({}, {}, {"version": version})


def test_empty_sections_and_null_are_read_past():
    sections = ["flags", "imex", "sharing", "resources", "selection", "health", "version"]
    files: list[dict[str, object]] = [{section: None} for section in sections]
    files += [{}, {"flags": {"plugin": None}}]
    for file in files:
        assert resolve({}, {}, file) == resolve({}, {})
    for section in sections[:-1]:
        assert resolve({}, {}, {section: {}}) == resolve({}, {})


@pytest.mark.parametrize(("content", "noun"), [(["flags"], "a list"), ("flags", "text"), (3, "3")])
def test_a_file_that_is_no_mapping_is_named(content, noun):
    with pytest.raises(ConfigError, match=rf"^/etc/plugin\.yaml: holds {noun}, not a mapping$"):
        resolve({"config_file": "/etc/plugin.yaml"}, {}, content)


# Unknown keys


@each(WITH_FILE)
def test_a_misspelt_key_is_told_the_right_one(option):
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, in_file(f"{option.file}s", "x"))
    assert str(caught.value) == f"config file: {option.file}s: unknown key; did you mean {option.file}?"


# Bad values


def bad(option: Option) -> str:
    """Something that this option cannot be."""
    if option.parse is boolean:
        return "maybe"
    if option.parse is text or option.parse is selected_gpus:
        return "a\nb"
    if option.parse is path:
        return "relative"
    return "7\n7"


@each(OPTIONS)
def test_a_bad_value_is_named_in_one_line_wherever_it_stands(option):
    wrong = bad(option)
    places: list[tuple[str, Callable[[], object]]] = [
        (f"environment variable {env}: ", partial(resolve, {}, {env: wrong})) for env in option.envs
    ]
    if option.flags:
        places.append((f"--{option.flags[0]}: ", partial(got, option, flag=wrong)))
    if option.file:
        places.append((f"config file: {option.file}: ", partial(got, option, file=wrong)))
    for named, asked in places:
        with pytest.raises(ConfigError) as caught:
            asked()
        assert str(caught.value).startswith(named)
        assert "\n" not in str(caught.value)


anything = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@BOUNDED
@given(st.sampled_from(WITH_FILE), anything)
def test_whatever_stands_in_the_file_is_a_value_or_a_named_fault(option, value):
    try:
        settings = resolve({}, {}, in_file(option.file, value))
    except ConfigError as error:
        assert option.file in str(error) or "--" in str(error)  # noqa: PT017
    else:
        hash(getattr(settings, option.name))


# Options that must agree


@pytest.mark.parametrize(
    ("flags", "directory", "socket", "pod_resources"),
    [
        ({}, KUBELET, f"{KUBELET}/kubelet.sock", "/var/lib/kubelet/pod-resources/kubelet.sock"),
        (
            {"kubelet_socket": "/run/k/p/other.sock"},
            "/run/k/p",
            "/run/k/p/other.sock",
            "/run/k/pod-resources/kubelet.sock",
        ),
        ({"kubelet_socket": "/kubelet.sock"}, "/", "/kubelet.sock", "/pod-resources/kubelet.sock"),
        ({"kubelet_socket": ""}, KUBELET, "", "/var/lib/kubelet/pod-resources/kubelet.sock"),
        (
            {"device_plugin_dir": "/run/k/p/"},
            "/run/k/p/",
            "/run/k/p//kubelet.sock",
            "/run/k/pod-resources/kubelet.sock",
        ),
        ({"device_plugin_dir": "/plugins"}, "/plugins", "/plugins/kubelet.sock", "/pod-resources/kubelet.sock"),
        ({"device_plugin_dir": "/a/b", "pod_resources_socket": "/c.sock"}, "/a/b", "/a/b/kubelet.sock", "/c.sock"),
        (
            {"kubelet_socket": "/a//k.sock", "device_plugin_dir": "/a"},
            "/a",
            "/a//k.sock",
            "/pod-resources/kubelet.sock",
        ),
        (
            {"kubelet_socket": "/a/k.sock", "device_plugin_dir": "/a/"},
            "/a/",
            "/a/k.sock",
            "/pod-resources/kubelet.sock",
        ),
        ({"kubelet_socket": "/k.sock", "device_plugin_dir": "/"}, "/", "/k.sock", "/pod-resources/kubelet.sock"),
        ({"kubelet_socket": "", "device_plugin_dir": "/a/b"}, "/a/b", "", "/a/pod-resources/kubelet.sock"),
    ],
)
def test_our_sockets_and_the_kubelets_are_in_one_directory(flags, directory, socket, pod_resources):
    settings = resolve(flags, {})
    found = (settings.socket_dir, settings.registration_socket, settings.effective_pod_resources_socket)
    assert found == (directory, socket, pod_resources)


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        *(
            (
                {"kubelet_socket": socket},
                {"DEVICE_PLUGIN_DIR": directory},
                f"--kubelet-socket {socket} is not in {of}: ",
            )
            for socket, directory in (("/a/k.sock", "/b"), ("/a/b/k.sock", "/a"), ("/a/k.sock", "/a/b"))
            for of in (f"--device-plugin-dir {directory}",)
        ),
        (
            {"config_file": "/a", "config_file_srcdir": "/b", "node_name": "n"},
            {},
            "--config-file /a and --config-file-srcdir /b: ",
        ),
        ({}, {"CONFIG_FILE_SRCDIR": "/b"}, "invalid --node-name: must not be empty with --config-file-srcdir"),
        ({"imex_required": "true", "imex_channel_ids": "auto"}, {}, "--imex-required needs --imex-channel-ids 0"),
        (
            {"include_gpus": "0,3,*H100*", "exclude_gpus": "03,*H100*"},
            {},
            "--exclude-gpus: 3, *H100* is also on the list of GPUs to include (--include-gpus, selection.include)",
        ),
    ],
)
def test_options_that_contradict_each_other(flags, environ, message):
    with pytest.raises(ConfigError) as caught:
        resolve(flags, environ)
    assert str(caught.value).startswith(message)
    assert len(caught.value.faults) == 1


def test_options_that_go_together():
    assert resolve({}, {"CONFIG_FILE_SRCDIR": "/b", "NODE_NAME": "n"}).node_name == "n"
    assert resolve({"imex_required": "true", "imex_channel_ids": "0"}, {}).imex_required


def test_a_gpu_that_a_file_includes_and_excludes_has_the_place_in_the_file():
    with pytest.raises(ConfigError, match=r"^config file: selection\.exclude: 1 is also on the list"):
        resolve({}, {}, {"selection": {"include": [0, 1], "exclude": [1]}})


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_directory_too_long_for_sockets_is_refused(letter):
    fits = "/" + letter * (71 // len(letter.encode()))  # the longest name of a socket takes the 35 that are left
    assert resolve({"device_plugin_dir": fits}, {}).socket_dir == fits
    for flags in ({"device_plugin_dir": fits + letter}, {"kubelet_socket": f"{fits}{letter}/kubelet.sock"}):
        with pytest.raises(
            ConfigError, match="too long, since a socket in it would exceed the kernel's limit of 107 bytes"
        ):
            resolve(flags, {})


def test_all_faults_are_told_and_the_first_is_the_text():
    file = parse(b"flags:\n  logLevel: y\n  migStrategy: x\n", "f")
    with pytest.raises(ConfigError) as caught:
        resolve({"log_format": "z"}, {"NVML_TIMEOUT": "1y"}, file)
    assert [(fault.source, fault.line) for fault in caught.value.faults] == [
        ("--log-format", 0),
        ("environment variable NVML_TIMEOUT", 0),
        ("f", 2),
        ("f", 3),
    ]
    assert str(caught.value) == "--log-format: 'z' is not one of text, json; and 3 more"


@pytest.mark.parametrize(("flags", "environ"), [({"mig_strategy": "none"}, {}), ({}, {"MIG_STRATEGY": "none"})])
def test_a_bad_value_of_the_file_that_is_overruled_is_a_remark(flags, environ):
    settings = resolve(flags, environ, {"flags": {"migStrategy": "x"}})
    assert settings.mig_strategy == "none"
    [remark] = settings.remarks
    assert str(remark) == (
        f"config file: flags.migStrategy: 'x' is not one of {', '.join(MIG_STRATEGIES)}; --mig-strategy or the environment "
        "overrules it, so it does no harm"
    )
    with pytest.raises(ConfigError, match=r"^config file: flags\.logLevel: 'y' is not one of"):
        resolve(flags, environ, {"flags": {"migStrategy": "x", "logLevel": "y"}})


def test_an_item_of_a_list_that_is_overruled_is_a_remark_too():
    settings = resolve({"exclude_gpus": "1"}, {}, {"selection": {"exclude": [0, "-1"]}})
    assert settings.exclude_gpus == ("1",)
    assert [remark.path for remark in settings.remarks] == ["selection.exclude[1]"]


def test_settings_differ_in_every_field_but_remarks():
    for name in Settings.__struct_fields__:
        changed = msgspec.structs.replace(DEFAULTS, **{name: object()})
        same = name in {"remarks", "without_effect"}
        assert (changed == DEFAULTS, changed != DEFAULTS) == (same, not same), name


def test_what_nvidias_programs_ignore_or_refuse_is_remarked():
    row: dict[str, object] = {"name": "gpu", "replicas": 2, "rename": "example.org/gpu", "devices": [0]}
    patterns = {"gpus": [{"pattern": "*H100*", "name": "example.com/h100"}], "mig": []}
    ignored, refused = resolve(
        {}, {}, {"resources": patterns, "sharing": {"timeSlicing": {"resources": [row]}}}
    ).remarks
    places = ["resources.gpus", *(f"sharing.timeSlicing.resources[0].{key}" for key in ("rename", "devices"))]
    assert str(ignored).startswith(f"config file: {', '.join(places)}: applied here, ignored by NVIDIA's plugin")
    assert str(refused).startswith(
        "config file: example.com/h100, example.org/gpu: a name with another domain than nvidia.com"
    )
    row = {"name": "nvidia.com/gpu", "replicas": 2, "devices": "all"}
    assert resolve({}, {}, {"sharing": {"timeSlicing": {"resources": [row]}}}).remarks == ()


def test_a_value_at_fault_contradicts_nothing():
    wanted = {"mps": {"resources": [{"name": "gpu", "replicas": 2}]}}
    with pytest.raises(ConfigError) as caught:
        resolve({"mps_root": "relative"}, {}, {"sharing": wanted})
    assert [str(fault) for fault in caught.value.faults] == ["--mps-root: 'relative' is not an absolute path"]


def test_a_value_at_fault_that_is_overruled_hides_no_contradiction():
    with pytest.raises(ConfigError, match=r"^--imex-required needs --imex-channel-ids 0"):
        resolve({"imex_required": "true", "imex_channel_ids": "auto"}, {}, {"imex": {"channelIDs": [7]}})


def test_verdicts_are_told_in_the_order_of_numbers_and_names():
    health = {"xid": {"79": "fatal", "48": "app"}, "signals": {"pcie-width": "ignore", "fabric": "fatal"}}
    told = ["xid.48: app", "xid.79: fatal", "signals.fabric: fatal", "signals.pcie-width: ignore"]
    assert differing(resolve({}, {}, {"health": health})) == [f"health.{each}" for each in told]


# Which file


def test_the_config_file_is_that_of_the_flag_then_the_environment():
    assert chosen({"config_file": "/a"}, {"CONFIG_FILE": "/b"}) == "/a"
    assert chosen({"config_file": None}, {"CONFIG_FILE": "/b"}) == "/b"
    assert chosen({}, {}) == ""


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DEFAULT_CONFIG", "shared"), ("NODE_LABEL", "example.com/config"), ("FALLBACK_STRATEGIES", "named,single")],
)
def test_a_choice_among_config_files_without_a_directory_of_them_has_no_effect_and_is_said(variable, value):
    [fault] = resolve({}, {variable: value}).without_effect
    assert fault.source == f"environment variable {variable}"
    assert "--config-file-srcdir" in fault.reason
    [fault] = resolve({variable.lower(): value}, {}).without_effect
    assert fault.source == f"--{variable.lower().replace('_', '-')}"
    whole = {variable: value, "CONFIG_FILE_SRCDIR": "/configs", "NODE_NAME": "a"}
    assert resolve({}, whole).without_effect == ()
    assert resolve({}, {"NODE_NAME": "a", "KUBECONFIG": "/b"}).without_effect == ()


@pytest.mark.parametrize("rest", ["metadata: {name: a}\ndata:\n  default: |\n    version: v1\n", "---\nkind: B\n"])
def test_a_manifest_in_place_of_a_config_file_is_one_fault(rest):
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, parse(f"apiVersion: v1\nkind: ConfigMap\n{rest}".encode(), "f"))
    [fault] = caught.value.faults
    assert str(fault).startswith(
        "f:2: kind: this is a Kubernetes manifest (ConfigMap): give one of the files in its data"
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('version: v1\nflags: {migStrategy: "{{ .Values.mig }}"}\n', "f:2: flags.migStrategy: "),
        ('version: v1\nflags:\n  "{{ .Values.flag }}": true\n', "f:3: flags.{{ .Values.flag }}: "),
        ('health:\n  xid: {"{{ .Values.xid }}": fatal}\n', "f:2: health.xid.{{ .Values.xid }}: "),
        (
            'version: v1\nresources:\n  gpus: [{pattern: "*", name: "{{ .Values.name }}"}]\n',
            "f:3: resources.gpus[0].name: ",
        ),
    ],
)
def test_a_quoted_template_action_is_named_as_the_cause(text, place):
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, parse(text.encode(), "f"))
    [fault] = caught.value.faults
    assert str(fault).startswith(place)
    assert "template" in str(fault)


def test_a_template_action_hides_no_other_fault_and_may_be_overruled():
    text = b'version: v1\nflags: {migStrategy: "{{ .Values.mig }}", failOnInitError: maybe}\n'
    for flags, places in (({}, {"migStrategy", "failOnInitError"}), ({"mig_strategy": "none"}, {"failOnInitError"})):
        with pytest.raises(ConfigError) as caught:
            resolve(flags, {}, parse(text, "f"))
        assert {fault.path for fault in caught.value.faults} == {f"flags.{place}" for place in places}
