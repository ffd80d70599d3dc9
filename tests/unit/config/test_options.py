import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import OPTIONS, Settings

# NVIDIA's plugin v0.20.0: flags, environment names in the order they are looked up, key in the config file, default.
NVIDIA = [
    (["mig-strategy"], ["MIG_STRATEGY"], "flags.migStrategy", "none"),
    (["fail-on-init-error"], ["FAIL_ON_INIT_ERROR"], "flags.failOnInitError", True),
    (["driver-root", "nvidia-driver-root"], ["NVIDIA_DRIVER_ROOT"], "flags.nvidiaDriverRoot", "/"),
    (["dev-root", "nvidia-dev-root"], ["NVIDIA_DEV_ROOT"], "flags.nvidiaDevRoot", ""),
    (["pass-device-specs"], ["PASS_DEVICE_SPECS"], "flags.plugin.passDeviceSpecs", False),
    (["device-list-strategy"], ["DEVICE_LIST_STRATEGY"], "flags.plugin.deviceListStrategy", ("envvar",)),
    (["device-id-strategy"], ["DEVICE_ID_STRATEGY"], "flags.plugin.deviceIDStrategy", "uuid"),
    (["gdrcopy-enabled"], ["GDRCOPY_ENABLED"], "flags.gdrcopyEnabled", False),
    (["gds-enabled"], ["GDS_ENABLED"], "flags.gdsEnabled", False),
    (["mofed-enabled"], ["MOFED_ENABLED"], "flags.mofedEnabled", False),
    (["cdi-annotation-prefix"], ["CDI_ANNOTATION_PREFIX"], "flags.plugin.cdiAnnotationPrefix", "cdi.k8s.io/"),
    (
        ["nvidia-cdi-hook-path", "nvidia-ctk-path"],
        ["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"],
        "flags.plugin.nvidiaCTKPath",
        "",  # theirs is /usr/bin/nvidia-ctk: their specifications cannot do without hooks
    ),
    (
        ["driver-root-ctr-path", "container-driver-root"],
        ["DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"],
        "flags.plugin.containerDriverRoot",
        "/driver-root",
    ),
    (["mps-root"], ["MPS_ROOT"], "flags.mpsRoot", ""),
    (
        ["shared-devices-allocation-policy"],
        ["SHARED_DEVICES_ALLOCATION_POLICY"],
        "flags.plugin.sharedDevicesAllocationPolicy",
        "distributed",
    ),
    (["device-discovery-strategy"], ["DEVICE_DISCOVERY_STRATEGY"], "flags.deviceDiscoveryStrategy", "auto"),
    (["imex-channel-ids"], ["IMEX_CHANNEL_IDS"], "imex.channelIDs", ()),
    (["imex-required"], ["IMEX_REQUIRED"], "imex.required", False),
    (["kubelet-socket"], ["KUBELET_SOCKET"], "", None),
    (["config-file"], ["CONFIG_FILE"], "", ""),
    (["cdi-feature-flags"], ["CDI_FEATURE_FLAGS"], "", ()),
    (["cdi-disable-hooks"], ["CDI_DISABLE_HOOKS"], "", ()),
    # Of its config-manager.
    (["config-file-srcdir"], ["CONFIG_FILE_SRCDIR"], "", ""),
    (["default-config"], ["DEFAULT_CONFIG"], "", ""),
    (["fallback-strategies"], ["FALLBACK_STRATEGIES"], "", ("named", "single")),
    (["node-name"], ["NODE_NAME"], "", ""),
    (["node-label"], ["NODE_LABEL"], "", "nvidia.com/device-plugin.config"),
    (["kubeconfig"], ["KUBECONFIG"], "", ""),
    ([], ["DP_DISABLE_HEALTHCHECKS"], "", ""),
    ([], ["DP_ENABLE_HEALTHCHECKS"], "", ""),
]


@pytest.mark.parametrize(("flags", "envs", "file", "default"), NVIDIA, ids=[row[1][0] for row in NVIDIA])
def test_every_option_of_nvidias_plugin_is_known_by_its_names_and_has_its_default(flags, envs, file, default):
    [option] = [option for option in OPTIONS if option.envs == tuple(envs)]
    assert (option.flags, option.file) == (tuple(flags), file)
    assert getattr(resolve({}, {}), option.name) == default


def test_options_and_settings_name_the_same_things():
    in_the_file_alone = {"sharing", "gpu_names", "mig_names", "verdicts"}
    found_out = {"device_list_strategy_reason", "remarks", "without_effect"}
    assert {option.name for option in OPTIONS} | in_the_file_alone | found_out == set(Settings.__struct_fields__)


def test_no_flag_variable_or_key_means_two_options_and_every_option_has_a_variable_and_help():
    keys = [option.file for option in OPTIONS if option.file]
    for names in (
        keys,
        *([name for option in OPTIONS for name in getattr(option, part)] for part in ("flags", "envs")),
    ):
        assert len(names) == len(set(names))
    assert not [(one, other) for one in keys for other in keys if other.startswith(f"{one}.")]
    for option in OPTIONS:
        assert option.help, option
        assert [env.upper() for env in option.envs] == [*option.envs] != [], option
