"""Every option of `gpu-plugin run` can be set: by a value, by the chart itself, or by extraArgs and extraEnv."""

from collections.abc import Mapping

import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import OPTIONS, Option, Settings
from tests.chart.helm import Helm, at_path, facts, overlaid, pods
from tests.chart.value_table import CONTAINER, MPS, TABLE

ITSELF = "set by the chart itself"
EXTRA = "extraArgs or extraEnv"

# By option: the path of its value, ITSELF or EXTRA. Other options are EXTRA.
WAYS: Mapping[str, str] = {
    "mig_strategy": "migStrategy",
    "fail_on_init_error": "failOnInitError",
    "driver_root": "nvidiaDriverRoot",
    "dev_root": "nvidiaDevRoot",
    "pass_device_specs": "passDeviceSpecs",
    "device_list_strategy": "deviceListStrategy",
    "device_id_strategy": "deviceIDStrategy",
    "gdrcopy_enabled": "gdrcopyEnabled",
    "gds_enabled": "gdsEnabled",
    "mofed_enabled": "mofedEnabled",
    "cdi_annotation_prefix": "cdi.annotationPrefix",
    "nvidia_cdi_hook_path": "cdi.nvidiaHookPath",
    "driver_root_ctr_path": "driverRootCtrPath",
    "mps_root": "mps.root",
    "shared_devices_allocation_policy": "sharedDevicesAllocationPolicy",
    "device_discovery_strategy": "deviceDiscoveryStrategy",
    "imex_channel_ids": "imex.channelIDs",
    "imex_required": "imex.required",
    "kubelet_socket": EXTRA,  # kubelet.devicePluginDir says where it is
    "config_file": EXTRA,  # the node's label names one
    "cdi_feature_flags": "cdi.featureFlags",
    "cdi_disable_hooks": "cdi.disableHooks",
    "config_file_srcdir": ITSELF,
    "default_config": "config.default",
    "fallback_strategies": "config.fallbackStrategies",
    "node_label": "config.nodeLabel",
    "kubeconfig": EXTRA,  # a pod has its service account
    "device_plugin_dir": "kubelet.devicePluginDir",
    "pod_resources_socket": "kubelet.podResourcesDir",
    "cdi_dir": "cdi.dir",
    "cdi_remove_on_exit": "cdi.removeOnExit",
    "include_gpus": "includeGPUs",
    "exclude_gpus": "excludeGPUs",
    "simulate": "simulate",
    "state_dir": "stateDir",
    "log_format": "log.format",
    "log_level": "log.level",
    "health_poll_interval": "health.pollInterval",
    "temperature_recovery": "health.temperatureRecovery",
    "nvml_timeout": "health.nvmlTimeout",
    "flap_guard": "health.flapGuard",
    "vanished_gpu_retention": "health.vanishedGPURetention",
    "event_loop": EXTRA,  # the image has one
    "disable_healthchecks": "health.disableHealthchecks",
    "enable_healthchecks": "health.enableHealthchecks",
    "xid_config": "health.xidConfig",
    "http_address": "http.port",
    "status_page": "http.statusPage",
    "status_page_hosts": "http.statusPageHosts",
    "pod_metrics": "http.podMetrics",
    "node_events": "cluster.nodeEvents",
    "pod_events": "cluster.podEvents",
    "node_condition": "cluster.nodeCondition",
    "node_taint": "cluster.nodeTaint",
    "cordon_annotation": "cluster.cordonAnnotation",
    "node_labels": "cluster.nodeLabels",
    "features_dir": "cluster.featuresDir",
}
BY_VALUE = {name: path for name, path in WAYS.items() if path not in {ITSELF, EXTRA}}
OF_NAME = {option.name: option for option in OPTIONS}


def environment(helm: Helm, values: Mapping[str, object]) -> dict[str, str]:
    """The plugin's environment as its container would have it."""
    (container,) = pods(helm.objects(values))["device-plugin"]["containers"]
    found = {each["name"]: each.get("value", "field") for each in container["env"]}
    return {name: value.replace("$(POD_IP)", "10.0.0.1") for name, value in found.items()}


def settings(helm: Helm, values: Mapping[str, object]) -> Settings:
    """Return the settings that the daemon reads from its environment. Raises ConfigError."""
    return resolve({}, environment(helm, values))


def test_ways_are_those_of_options() -> None:
    assert not set(WAYS) - set(OF_NAME)


@pytest.mark.parametrize("name", BY_VALUE)
def test_the_value_of_an_option_reaches_the_daemon(helm: Helm, name: str) -> None:
    shown = TABLE[BY_VALUE[name]]
    before = settings(helm, shown.given)
    after = settings(helm, overlaid(shown.given, at_path(BY_VALUE[name], shown.value)))
    assert getattr(after, name) != getattr(before, name)


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way is ITSELF])
def test_what_the_chart_sets_itself_reaches_the_daemon(helm: Helm, name: str) -> None:
    assert getattr(settings(helm, MPS), name)
    assert not getattr(settings(helm, {}), name)


def test_the_name_of_the_node_reaches_the_daemon_always(helm: Helm) -> None:
    assert settings(helm, {}).node_name


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_extra_arguments_and_variables_reach_the_container(helm: Helm, option: Option) -> None:
    if option.flags:
        argument = f"--{option.flags[0]}=x"
        assert f"{CONTAINER}.args.1={argument}" in facts(helm.objects({"extraArgs": [argument]}))
    variable = {"name": option.envs[0], "value": "x"}
    (container,) = pods(helm.objects({"extraEnv": [variable]}))["device-plugin"]["containers"]
    # An API server takes each name once.
    assert [each for each in container["env"] if each["name"] == variable["name"]] == [variable]


def test_the_mps_daemons_are_given_what_the_plugin_is(helm: Helm) -> None:
    found = pods(helm.objects(overlaid(MPS, {"extraArgs": ["--log-level=debug"], "migStrategy": "single"})))
    (plugin,), mps = found["device-plugin"]["containers"], found["mps-control-daemon"]
    its_own = {"POD_IP", "HTTP_ADDRESS"}
    for container in (*mps["initContainers"], *mps["containers"]):
        assert container["env"] == [each for each in plugin["env"] if each["name"] not in its_own]
        assert container["args"][-1] == "--log-level=debug"


def test_no_variable_is_set_twice(helm: Helm) -> None:
    (container,) = pods(helm.objects(MPS))["device-plugin"]["containers"]
    names = [each["name"] for each in container["env"]]
    assert len(names) == len(set(names))
    known = {env for option in OPTIONS for env in option.envs}
    nvidias = {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_MIG_MONITOR_DEVICES"}
    assert set(names) <= known | nvidias | {"POD_IP", "POD_NAMESPACE", "POD_NAME"}


def test_no_variable_is_empty(helm: Helm) -> None:
    assert all(environment(helm, {}).values())
