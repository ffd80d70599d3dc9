"""Every option of `gpu-plugin run` as data: its flags, environment names, place in the config file, default and reading.

Names and defaults of the first block are those of NVIDIA's plugin v0.20.0 (cmd/nvidia-device-plugin/main.go,
api/config/v1/flags.go), so that its manifests and config files carry over.
"""

from dataclasses import dataclass

from gpu_plugin.config import settings, values
from gpu_plugin.config.values import Parse


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    `name` is the field of Settings; `flags` without dashes, the first is the one we show; `envs` in the order they are
    looked up; `file` the dotted key in the config file; `default` is read by `parse` unless it is None;
    `effective` is False for what is accepted for the sake of existing manifests and has no effect in this version.
    """

    name: str
    flags: tuple[str, ...]
    envs: tuple[str, ...]
    file: str
    default: object
    parse: Parse
    help: str
    switch: bool = False
    effective: bool = True


def _switch(name: str, file: str, default: object, text: str, *flags: str, effective: bool = True) -> Option:
    flag = name.replace("_", "-")
    return Option(
        name, (flag, *flags), (name.upper(),), file, default, values.boolean, text, switch=True, effective=effective
    )


OPTIONS: tuple[Option, ...] = (
    Option(
        "mig_strategy",
        ("mig-strategy",),
        ("MIG_STRATEGY",),
        "flags.migStrategy",
        "none",
        values.choice("none", "single", "mixed"),
        "how MIG devices are offered; GPUs in MIG mode are held back under single and mixed in this version",
    ),
    _switch(
        "fail_on_init_error",
        "flags.failOnInitError",
        True,
        "exit when there is no driver or no GPU; false: keep looking for one",
    ),
    Option(
        "driver_root",
        ("driver-root", "nvidia-driver-root"),
        ("NVIDIA_DRIVER_ROOT",),
        "flags.nvidiaDriverRoot",
        "/",
        values.path,
        "root of the driver installation on the host",
    ),
    Option(
        "dev_root",
        ("dev-root", "nvidia-dev-root"),
        ("NVIDIA_DEV_ROOT",),
        "flags.nvidiaDevRoot",
        "",
        values.optional_path,
        "root of /dev on the host, where it is not the driver root",
    ),
    _switch("pass_device_specs", "flags.plugin.passDeviceSpecs", False, "name the device nodes in Allocate"),
    Option(
        "device_list_strategy",
        ("device-list-strategy",),
        ("DEVICE_LIST_STRATEGY",),
        "flags.plugin.deviceListStrategy",
        "envvar",
        values.choices("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"),
        "how the runtime is told of devices, one or several of envvar, volume-mounts, cdi-annotations, cdi-cri",
    ),
    Option(
        "device_id_strategy",
        ("device-id-strategy",),
        ("DEVICE_ID_STRATEGY",),
        "flags.plugin.deviceIDStrategy",
        "uuid",
        values.choice("uuid", "index"),
        "what the runtime is told a device is called",
    ),
    _switch("gdrcopy_enabled", "flags.gdrcopyEnabled", False, "give containers GDRCopy"),
    _switch("gds_enabled", "flags.gdsEnabled", False, "give containers GPUDirect Storage"),
    _switch("mofed_enabled", "flags.mofedEnabled", False, "give containers the MOFED devices"),
    Option(
        "cdi_annotation_prefix",
        ("cdi-annotation-prefix",),
        ("CDI_ANNOTATION_PREFIX",),
        "flags.plugin.cdiAnnotationPrefix",
        "cdi.k8s.io/",
        values.text,
        "prefix of the annotation key under cdi-annotations",
    ),
    Option(
        "nvidia_cdi_hook_path",
        ("nvidia-cdi-hook-path", "nvidia-ctk-path"),
        ("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        "flags.plugin.nvidiaCTKPath",
        "/usr/bin/nvidia-ctk",
        values.optional_path,
        "host path of the hook named in CDI specs",
        effective=False,
    ),
    Option(
        "driver_root_ctr_path",
        ("driver-root-ctr-path", "container-driver-root"),
        ("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        "flags.plugin.containerDriverRoot",
        "/driver-root",
        values.path,
        "where the driver root is mounted for this process",
    ),
    Option(
        "mps_root",
        ("mps-root",),
        ("MPS_ROOT",),
        "flags.mpsRoot",
        "",
        values.optional_path,
        "host directory of MPS pipes",
        effective=False,
    ),
    Option(
        "shared_devices_allocation_policy",
        ("shared-devices-allocation-policy",),
        ("SHARED_DEVICES_ALLOCATION_POLICY",),
        "flags.plugin.sharedDevicesAllocationPolicy",
        "distributed",
        values.choice("distributed", "packed"),
        "which GPUs shared devices are taken from",
        effective=False,
    ),
    Option(
        "device_discovery_strategy",
        ("device-discovery-strategy",),
        ("DEVICE_DISCOVERY_STRATEGY",),
        "flags.deviceDiscoveryStrategy",
        "auto",
        values.choice("auto", "nvml", "tegra"),
        "how GPUs are found; tegra is not served in this version",
    ),
    Option(
        "imex_channel_ids",
        ("imex-channel-ids",),
        ("IMEX_CHANNEL_IDS",),
        "imex.channelIDs",
        "",
        values.imex_channels,
        "IMEX channels given to every container: none or 0",
    ),
    _switch("imex_required", "imex.required", False, "treat a missing IMEX channel as an error"),
    Option(
        "kubelet_socket",
        ("kubelet-socket",),
        ("KUBELET_SOCKET",),
        "",
        None,
        values.optional_path,
        "the kubelet's registration socket; empty: serve without registering [default: kubelet.sock in the directory]",
    ),
    Option(
        "config_file",
        ("config-file",),
        ("CONFIG_FILE",),
        "",
        "",
        values.text,
        "settings as YAML or JSON, in NVIDIA's schema v1",
    ),
    Option(
        "cdi_feature_flags",
        ("cdi-feature-flags",),
        ("CDI_FEATURE_FLAGS",),
        "",
        "",
        values.texts,
        "features of the CDI specs",
        effective=False,
    ),
    Option(
        "cdi_disable_hooks",
        ("cdi-disable-hooks",),
        ("CDI_DISABLE_HOOKS",),
        "",
        "",
        values.texts,
        "hooks left out of the CDI specs",
        effective=False,
    ),
    # Ours.
    Option(
        "device_plugin_dir",
        ("device-plugin-dir",),
        ("DEVICE_PLUGIN_DIR",),
        "flags.devicePluginDir",
        None,
        values.path,
        f"where kubelet.sock and our sockets lie [default: {settings.DEVICE_PLUGIN_DIR}]",
    ),
    Option(
        "simulate",
        ("simulate",),
        ("SIMULATE",),
        "",
        "",
        values.text,
        "serve a simulated node: the name of a profile, or a file that describes one",
    ),
    Option(
        "state_dir",
        ("state-dir",),
        ("STATE_DIR",),
        "flags.stateDir",
        settings.STATE_DIR,
        values.path,
        "where what must outlive this process is kept",
    ),
    Option(
        "log_format",
        ("log-format",),
        ("LOG_FORMAT",),
        "flags.logFormat",
        "text",
        values.choice("text", "json"),
        "form of log lines, text or json",
    ),
    Option(
        "log_level",
        ("log-level",),
        ("LOG_LEVEL",),
        "flags.logLevel",
        "info",
        values.choice("debug", "info", "warning", "error"),
        "least severe lines shown: debug, info, warning, error",
    ),
    Option(
        "health_poll_interval",
        ("health-poll-interval",),
        ("HEALTH_POLL_INTERVAL",),
        "flags.healthPollInterval",
        "5s",
        values.duration(0.05, 3600),
        "time between two looks at every GPU",
    ),
    Option(
        "temperature_recovery",
        ("temperature-recovery",),
        ("TEMPERATURE_RECOVERY",),
        "flags.temperatureRecovery",
        "5m",
        values.duration(0, 86400),
        "how long an overheated GPU must stay cool before it is Healthy again",
    ),
    Option(
        "nvml_timeout",
        ("nvml-timeout",),
        ("NVML_TIMEOUT",),
        "flags.nvmlTimeout",
        "30s",
        values.duration(0.1, 3600),
        "how long an NVML call may take before its GPU counts as hung",
    ),
    Option(
        "event_loop",
        ("event-loop",),
        ("EVENT_LOOP",),
        "flags.eventLoop",
        "asyncio",
        values.choice("asyncio", "uvloop"),
        "event loop: asyncio, or uvloop where the extra of that name is installed (a tenth faster, 2 MiB more)",
    ),
    Option(
        "disable_healthchecks",
        (),
        ("DP_DISABLE_HEALTHCHECKS",),
        "",
        "",
        values.text,
        "Xids that are no fault: numbers, xids, or all",
    ),
    Option(
        "enable_healthchecks",
        (),
        ("DP_ENABLE_HEALTHCHECKS",),
        "",
        "",
        values.text,
        "Xids that are a fault after all: numbers, or all",
    ),
)
