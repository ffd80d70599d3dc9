from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpu_plugin.config.choices import MIG_STRATEGIES
from gpu_plugin.config.device_names import selected_gpus
from gpu_plugin.config.document import parse, spell
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import chosen, resolve
from gpu_plugin.config.settings import OPTIONS, Option
from gpu_plugin.config.values import boolean, path, text

BOUNDED = hypothesis_settings(max_examples=40, deadline=None)

# Two valid texts for every option. Neither is the default if there is a third value.
VALUES: dict[str, tuple[str, str]] = {
    "mig_strategy": ("single", "mixed"),
    "driver_root": ("/run/nvidia/driver", "/opt/driver"),
    "dev_root": ("/run/nvidia", "/opt"),
    "device_list_strategy": ("cdi-cri", "volume-mounts,envvar"),
    "device_id_strategy": ("index", "uuid"),
    "cdi_annotation_prefix": ("a.example/", "b.example/"),
    "nvidia_cdi_hook_path": ("/a/hook", "/b/hook"),
    "driver_root_ctr_path": ("/a", "/b"),
    "mps_root": ("/a/mps", "/b/mps"),
    "shared_devices_allocation_policy": ("packed", "spread"),
    "device_discovery_strategy": ("nvml", "auto"),
    "imex_channel_ids": ("0", ","),
    "kubelet_socket": ("/a/kubelet.sock", "/b/kubelet.sock"),
    "config_file": ("/a.yaml", "/b.yaml"),
    "cdi_feature_flags": ("one", "two,three"),
    "cdi_disable_hooks": ("all", "chmod"),
    "cdi_dir": ("/a", "/b"),
    "config_file_srcdir": ("/a/available", "/b/available"),
    "default_config": ("a", "b"),
    "fallback_strategies": ("empty", "single,named"),
    "node_name": ("node-a", "node-b"),
    "node_label": ("a.example/config", "config"),
    "kubeconfig": ("/a/config", "/b/config"),
    "device_plugin_dir": ("/a", "/b"),
    "pod_resources_socket": ("/a/kubelet.sock", "/b/kubelet.sock"),
    "status_page_hosts": ("gpus.example.com", "*.example.com"),
    "include_gpus": ("0,GPU-00000000-0000-4000-8000-00000000000a", "*H100*"),
    "exclude_gpus": ("1", "0000:3b:00.0"),
    "simulate": ("h200", "dgx-a100"),
    "state_dir": ("/a", "/b"),
    "http_address": ("10.0.0.7:9480", "[::1]:9481"),
    "event_loop": ("uvloop", "asyncio"),
    "node_taint": ("NoSchedule", "NoExecute"),
    "node_labels": ("file", "api"),
    "features_dir": ("/a", "/b"),
    "log_format": ("json", "text"),
    "log_level": ("debug", "error"),
    "health_poll_interval": ("1s", "100ms"),
    "temperature_recovery": ("1m", "2m"),
    "nvml_timeout": ("10s", "20s"),
    "flap_guard": ("0s", "30m"),
    "vanished_gpu_retention": ("1s", "720h"),
    "disable_healthchecks": ("all", "13"),
    "enable_healthchecks": ("79", "all"),
    "xid_config": ("13", "31,43"),
} | {option.name: ("true", "false") for option in OPTIONS if option.switch}

# Values that an option needs.
BESIDE: dict[str, dict[str, object]] = {"config_file_srcdir": {"node_name": "node-a"}}


def two_values(option: Option) -> tuple[str, str]:
    """Two that the option takes and reads differently."""
    schema = option.parse.schema
    if option.name in VALUES:
        return VALUES[option.name]
    if schema == text.schema:
        return "one", "other"
    if isinstance(words := schema.get("enum"), list):
        return words[-1], words[-2]
    raise LookupError(
        f"the option {option.name!r} is read by a rule of its own: add two values that it takes to VALUES here"
    )


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
    one, other = two_values(option)
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
            written = two_values(option)[0]
            assert got(option, env="", file=written) == option.parse(written)


@each([option for option in OPTIONS if len(option.envs) > 1])
def test_the_first_environment_name_wins_over_the_later_ones(option):
    one, other = two_values(option)
    first, second = option.envs
    assert getattr(resolve({}, {first: one, second: other}), option.name) == one
    assert getattr(resolve({}, {second: other}), option.name) == other
    assert getattr(resolve({}, {first: "", second: other}), option.name) == other


def test_a_kubelet_socket_set_to_nothing_asks_for_no_registration():
    assert resolve({}, {"KUBELET_SOCKET": ""}).registration_socket == ""
    assert resolve({"kubelet_socket": ""}, {"KUBELET_SOCKET": "/a/kubelet.sock"}).registration_socket == ""
    assert resolve({}, {}).registration_socket != ""


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

HOLDERS = ("", "flags", "flags.plugin", "imex", "selection")
KNOWN = {option.file for option in WITH_FILE} | {"flags.gfd", "flags.useNodeFeatureAPI"}
VALID = KNOWN | set(HOLDERS) | {"version", "sharing", "resources"}


@st.composite
def valid_files(draw: st.DrawFn) -> dict[str, Any]:
    """A file that resolves, with every mapping of the schema in it."""
    file: dict[str, Any] = {"flags": {"plugin": {}}, "imex": {}, "selection": {}}
    for option in draw(st.lists(st.sampled_from(WITH_FILE), unique=True)):
        *above, last = option.file.split(".")
        holder = file
        for part in above:
            holder = holder[part]
        holder[last] = draw(st.sampled_from(two_values(option)))
    if draw(st.booleans()):
        file["version"] = "v1"
    if draw(st.booleans()):
        file["flags"]["gfd"] = {"oneshot": True}
    return file


def holder_of(file: dict[str, Any], where: str) -> dict[str, Any]:
    for part in filter(None, where.split(".")):
        file = file[part]
    return file


misspelt = st.sampled_from(sorted(KNOWN)).map(lambda key: key.rpartition(".")[2]).flatmap(
    lambda key: st.integers(0, len(key) - 1).map(lambda at: key[:at] + key[at + 1 :])
)  # fmt: skip
words = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=20)


@BOUNDED
@given(valid_files(), st.sampled_from(HOLDERS), words | misspelt, st.sampled_from([None, 1, "x", [], {}, {"a": {}}]))
def test_an_unknown_key_anywhere_is_refused_by_its_dotted_name(file, where, key, value):
    resolve({}, {}, file)
    dotted = f"{where}.{key}" if where else key
    if dotted in VALID:
        return
    holder_of(file, where)[key] = value
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, file)
    place = spell((*filter(None, where.split(".")), key))
    assert str(caught.value).startswith(f"config file: {place}: unknown key")


@each(WITH_FILE)
def test_a_misspelt_key_is_told_the_right_one(option):
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, in_file(f"{option.file}s", "x"))
    assert str(caught.value) == f"config file: {option.file}s: unknown key; did you mean {option.file}?"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"Sharing_": {}}, "Sharing_: unknown key; did you mean sharing?"),
        (
            {"flags": {"migstrategy": "single", "MigStrategy": "single"}},
            "flags.migstrategy: unknown key; did you mean flags.migStrategy?; and 1 more",
        ),
        ({3: 1}, "3: unknown key"),
        (
            {"flags": {"plugin.passDeviceSpecs": 1}},
            "flags.plugin.passDeviceSpecs: unknown key; nest mappings instead of writing dots",
        ),
    ],
)
def test_a_key_that_is_none(file, message):
    with pytest.raises(ConfigError) as caught:
        resolve({"config_file": "/etc/plugin.yaml"}, {}, file)
    assert str(caught.value) == f"/etc/plugin.yaml: {message}"


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


def test_our_sockets_follow_the_kubelets():
    settings = resolve({"kubelet_socket": "/run/other/kubelet.sock"}, {})
    assert (settings.socket_dir, settings.registration_socket) == ("/run/other", "/run/other/kubelet.sock")


def test_the_kubelets_socket_follows_the_directory():
    settings = resolve({}, {"DEVICE_PLUGIN_DIR": "/run/other"})
    assert (settings.socket_dir, settings.registration_socket) == ("/run/other", "/run/other/kubelet.sock")


@pytest.mark.parametrize(
    ("socket", "directory"),
    [
        ("/run/a/kubelet.sock", "/run/a"),
        ("/run/a/kubelet.sock", "/run/a/"),
        ("/run/a//kubelet.sock", "/run/a"),
        ("/run/a/other.sock", "/run/a"),
        ("/kubelet.sock", "/"),
        ("", "/run/a"),
    ],
)
def test_a_socket_in_the_directory_agrees_with_it(socket, directory):
    settings = resolve({"kubelet_socket": socket, "device_plugin_dir": directory}, {})
    assert (settings.socket_dir, settings.registration_socket) == (directory, socket)


@pytest.mark.parametrize(
    ("socket", "directory"),
    [("/run/a/kubelet.sock", "/run/b"), ("/run/a/kubelet.sock", "/run"), ("/run/a/x/kubelet.sock", "/run/a")],
)
def test_a_socket_outside_the_directory_is_a_contradiction(socket, directory):
    with pytest.raises(ConfigError, match=f"^--kubelet-socket {socket} is not in --device-plugin-dir {directory}: "):
        resolve({"kubelet_socket": socket}, {"DEVICE_PLUGIN_DIR": directory})


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_directory_too_long_for_sockets_is_refused(letter):
    width = len(letter.encode())
    fits = "/" + letter * (71 // width)  # the longest name of a socket takes the 35 that are left
    assert resolve({"device_plugin_dir": fits}, {}).socket_dir == fits
    for flags in ({"device_plugin_dir": fits + letter}, {"kubelet_socket": f"{fits}{letter}/kubelet.sock"}):
        with pytest.raises(
            ConfigError, match="the path is too long, since a socket in it would exceed the kernel's limit of 107 bytes"
        ):
            resolve(flags, {})


def test_settings_come_from_one_file_or_from_a_directory():
    with pytest.raises(
        ConfigError, match=r"^--config-file /a and --config-file-srcdir /b: .* remove one of these options$"
    ):
        resolve({"config_file": "/a", "config_file_srcdir": "/b", "node_name": "n"}, {})


def test_a_directory_of_files_needs_the_node_whose_label_chooses():
    with pytest.raises(ConfigError, match=r"^invalid --node-name: must not be empty with --config-file-srcdir"):
        resolve({}, {"CONFIG_FILE_SRCDIR": "/b"})
    assert resolve({}, {"CONFIG_FILE_SRCDIR": "/b", "NODE_NAME": "n"}).node_name == "n"


def test_a_gpu_both_included_and_excluded_is_a_contradiction():
    both = r"3, \*H100\* is also on the list of GPUs to include \(--include-gpus, selection.include\)$"
    with pytest.raises(ConfigError, match=rf"^--exclude-gpus: {both}"):
        resolve({"include_gpus": "0,3,*H100*", "exclude_gpus": "03,*H100*"}, {})
    with pytest.raises(ConfigError, match=r"selection\.exclude: 1 is also on the list"):
        resolve({}, {}, {"selection": {"include": [0, 1], "exclude": [1]}})


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


def test_settings_are_equal_whatever_was_remarked_about_them():
    asked: dict[str, object] = {"mig_strategy": "none"}
    assert resolve(asked, {}, {"flags": {"migStrategy": "x"}}) == resolve(asked, {})


OURS_ALONE: dict[str, object] = {
    "resources": {"gpus": [{"pattern": "*H100*", "name": "example.com/h100"}], "mig": []},
    "sharing": {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 2, "rename": "gpu.shared", "devices": [0]}]}},
}


def test_what_nvidias_programs_ignore_or_refuse_is_remarked():
    assert [str(remark) for remark in resolve({}, {}, OURS_ALONE).remarks] == [
        (
            "config file: resources.gpus, sharing.timeSlicing.resources[0].rename, "
            "sharing.timeSlicing.resources[0].devices: applied here, ignored by NVIDIA's plugin v0.20.0"
        ),
        (
            "config file: example.com/h100: a name with another domain than nvidia.com, for which NVIDIA's GPU feature discovery "
            "and MPS control daemon refuse the file; if they run on this node too, give them a file without it"
        ),
    ]
    same = {"sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2, "devices": "all"}]}}}
    assert resolve({}, {}, same).remarks == ()


def test_a_value_at_fault_contradicts_nothing():
    wanted = {"mps": {"resources": [{"name": "gpu", "replicas": 2}]}}
    with pytest.raises(ConfigError) as caught:
        resolve({"mps_root": "relative"}, {}, {"sharing": wanted})
    assert [str(fault) for fault in caught.value.faults] == ["--mps-root: 'relative' is not an absolute path"]


# Which file


def test_the_config_file_is_that_of_the_flag_then_the_environment():
    assert chosen({"config_file": "/a"}, {"CONFIG_FILE": "/b"}) == "/a"
    assert chosen({"config_file": None}, {"CONFIG_FILE": "/b"}) == "/b"
    assert chosen({}, {}) == ""


def test_a_required_imex_channel_is_named():
    with pytest.raises(ConfigError, match="--imex-required needs --imex-channel-ids 0"):
        resolve({"imex_required": "true", "imex_channel_ids": "auto"}, {})
    assert resolve({"imex_required": "true", "imex_channel_ids": "0"}, {}).imex_required


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


def test_a_manifest_in_place_of_a_config_file_is_said_in_one_fault():
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata:\n  default: |\n    version: v1\n"
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, parse(text.encode(), "f"))
    [fault] = caught.value.faults
    assert str(fault).startswith("f:2: kind: ")
    assert "ConfigMap" in str(fault)
    assert "data" in str(fault)


def test_a_manifest_with_more_documents_is_still_a_manifest():
    text = "apiVersion: v1\nkind: Namespace\n---\napiVersion: v1\nkind: ConfigMap\n"
    with pytest.raises(ConfigError, match=r"f:2: kind: .*Kubernetes manifest"):
        resolve({}, {}, parse(text.encode(), "f"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('version: v1\nflags: {migStrategy: "{{ .Values.mig }}"}\n', "f:2: flags.migStrategy: "),
        ('version: v1\nflags:\n  "{{ .Values.flag }}": true\n', "f:3: flags.{{ .Values.flag }}: "),
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
