"""Every option of `gpu-plugin run` as data: its flags, environment names, place in the config file, default and reading.

Names and defaults of the first block are those of NVIDIA's plugin v0.20.0 (cmd/nvidia-device-plugin/main.go,
api/config/v1/flags.go) and of its config-manager (cmd/config-manager/main.go), so that manifests and config files carry over.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from gpu_plugin.config import places, settings, values
from gpu_plugin.config.choices import ALLOCATION_POLICIES, DEVICE_LIST_STRATEGIES, MIG_STRATEGIES, listed
from gpu_plugin.config.device_names import selected_gpus
from gpu_plugin.config.sharing import DISTRIBUTED
from gpu_plugin.config.values import Reading


class Option(msgspec.Struct, frozen=True):
    """One option.

    `name` is the field of Settings; `flags` without dashes, the first is the one we show; `envs` in the order they are
    looked up; `file` the dotted key in the config file; `default` is read by `parse` unless it is None.
    """

    name: str
    flags: tuple[str, ...]
    envs: tuple[str, ...]
    file: str
    default: object
    parse: Reading[object]
    help: str

    @property
    def switch(self) -> bool:
        """Whether the flag may stand without a value."""
        return self.parse in (values.boolean, values.boolean_or_auto)

    @property
    def many(self) -> bool:
        """Whether the flag may be repeated: its value is a list."""
        forms = cast("Sequence[Mapping[str, object]]", self.parse.schema.get("anyOf", ()))
        return any(form.get("type") == "array" for form in forms)


def _option(
    name: str,
    file: str,
    default: object,
    parse: Reading[object],
    text: str,
    *,
    flags: tuple[str, ...] = (),
    envs: tuple[str, ...] = (),
) -> Option:
    """An option whose flag and environment variable are its name, unless others are given."""
    return Option(name, flags or (name.replace("_", "-"),), envs or (name.upper(),), file, default, parse, text)


def _switch(name: str, file: str, default: object, text: str, parse: Reading[object] = values.boolean) -> Option:
    return _option(name, file, default, parse, text)


def _feature(name: str, file: str, what: str) -> Option:
    return _switch(
        name, file, False, f"give containers {what}; auto: where its device nodes exist", values.boolean_or_auto
    )


NVIDIA: tuple[Option, ...] = (
    _option(
        "mig_strategy",
        "flags.migStrategy",
        "none",
        values.choice(*MIG_STRATEGIES),
        f"how MIG devices are offered: {listed(MIG_STRATEGIES)}",
    ),
    _switch(
        "fail_on_init_error",
        "flags.failOnInitError",
        True,
        "exit when there is no driver or no GPU; false: keep looking for one",
    ),
    _option(
        "driver_root",
        "flags.nvidiaDriverRoot",
        "/",
        values.root,
        "root of the driver installation on the host",
        flags=("driver-root", "nvidia-driver-root"),
        envs=("NVIDIA_DRIVER_ROOT",),
    ),
    _option(
        "dev_root",
        "flags.nvidiaDevRoot",
        "",
        values.optional_path,
        "root of /dev on the host, where it is not the driver root",
        flags=("dev-root", "nvidia-dev-root"),
        envs=("NVIDIA_DEV_ROOT",),
    ),
    _switch(
        "pass_device_specs", "flags.plugin.passDeviceSpecs", False, "list the device nodes in the answer to Allocate"
    ),
    _option(
        "device_list_strategy",
        "flags.plugin.deviceListStrategy",
        "envvar",
        values.choices(*DEVICE_LIST_STRATEGIES, exclusive=values.AUTO),
        f"how the runtime is told of devices, one or several of {listed(DEVICE_LIST_STRATEGIES)}; "
        "auto: cdi-cri where kubelet and runtime are known to take CDI device names, else envvar",
    ),
    _option(
        "device_id_strategy",
        "flags.plugin.deviceIDStrategy",
        "uuid",
        values.choice("uuid", "index"),
        "how devices are identified to the runtime",
    ),
    _feature("gdrcopy_enabled", "flags.gdrcopyEnabled", "GDRCopy"),
    _feature("gds_enabled", "flags.gdsEnabled", "GPUDirect Storage"),
    _feature("mofed_enabled", "flags.mofedEnabled", "the MOFED devices"),
    _option(
        "cdi_annotation_prefix",
        "flags.plugin.cdiAnnotationPrefix",
        "cdi.k8s.io/",
        values.text,
        "prefix of the annotation key under cdi-annotations",
    ),
    _option(
        "nvidia_cdi_hook_path",
        "flags.plugin.nvidiaCTKPath",
        "",
        values.optional_path,
        "NVIDIA's hook on the host, nvidia-ctk or nvidia-cdi-hook, for CDI specifications with hooks; empty: they need none",
        flags=("nvidia-cdi-hook-path", "nvidia-ctk-path"),
        envs=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
    ),
    _option(
        "driver_root_ctr_path",
        "flags.plugin.containerDriverRoot",
        "/driver-root",
        values.path,
        "where the driver root is mounted for this process",
        flags=("driver-root-ctr-path", "container-driver-root"),
        envs=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
    ),
    _option("mps_root", "flags.mpsRoot", "", values.optional_path, "host directory of MPS pipes"),
    _option(
        "shared_devices_allocation_policy",
        "flags.plugin.sharedDevicesAllocationPolicy",
        DISTRIBUTED,
        values.choice(*ALLOCATION_POLICIES),
        f"which GPUs shared devices are taken from: {listed(ALLOCATION_POLICIES)}",
    ),
    _option(
        "device_discovery_strategy",
        "flags.deviceDiscoveryStrategy",
        "auto",
        values.choice("auto", "nvml", "tegra"),
        "how GPUs are found: what suits the platform, by NVML, or as the one GPU of a Tegra",
    ),
    _option(
        "imex_channel_ids",
        "imex.channelIDs",
        "",
        values.imex_channels,
        "IMEX channels given to every container: none or 0; auto: 0 where its device node exists",
    ),
    _switch("imex_required", "imex.required", False, "treat a missing IMEX channel as an error"),
    _option(
        "kubelet_socket",
        "",
        None,
        values.optional_path,
        "the kubelet's registration socket; empty: serve without registering [default: kubelet.sock in the directory]",
    ),
    _option("config_file", "", "", values.text, "settings as YAML or JSON, in NVIDIA's schema v1"),
    _option(
        "cdi_feature_flags",
        "",
        "",
        values.texts,
        "NVIDIA's feature flags for CDI: no-additional-gids-for-device-nodes (no groups for DRM nodes), "
        "disable-ipc-discoverer (no sockets of the driver's daemons); others change nothing",
    ),
    _option("cdi_disable_hooks", "", "", values.texts, "hooks of NVIDIA's to leave out, by name, or all"),
    _option(
        "config_file_srcdir", "", "", values.text, "directory of settings files, of which the node's label names one"
    ),
    _option("default_config", "", "", values.text, "the file in that directory for a node without the label"),
    _option(
        "fallback_strategies",
        "",
        "named,single",
        values.choices("named", "single", "empty"),
        "without a label or default: named (the file default), single (the only file), empty (no file); in order",
    ),
    _option("node_name", "", "", values.text, "the Node whose label names the settings file"),
    _option(
        "node_label", "", "nvidia.com/device-plugin.config", values.label_key, "the label that names the settings file"
    ),
    _option("kubeconfig", "", "", values.text, "how to reach the Kubernetes API [default: as a pod of the cluster]"),
)

OURS: tuple[Option, ...] = (
    _option(
        "device_plugin_dir",
        "flags.devicePluginDir",
        None,
        values.path,
        f"directory of kubelet.sock and of our sockets [default: {settings.DEVICE_PLUGIN_DIR}]",
    ),
    _option(
        "pod_resources_socket",
        "flags.podResourcesSocket",
        None,
        values.path,
        "where the kubelet says which devices pods hold "
        "[default: pod-resources/kubelet.sock beside the directory of device plugins]",
    ),
    _option(
        "cdi_dir",
        "flags.plugin.cdiDir",
        settings.CDI_DIR,
        values.path,
        "where CDI specifications are written for the container runtime to read",
    ),
    _switch(
        "cdi_remove_on_exit",
        "flags.plugin.cdiRemoveOnExit",
        False,
        "remove the CDI specifications when told to stop: for uninstalling, since containers that restart need them",
    ),
    _option(
        "include_gpus",
        "selection.include",
        "",
        selected_gpus,
        "serve only these GPUs: index, GPU-<uuid>, PCI bus id or model, in which * stands for any text",
    ),
    _option("exclude_gpus", "selection.exclude", "", selected_gpus, "serve all GPUs except these, named the same way"),
    _option(
        "simulate", "", "", values.text, "serve a simulated node: the name of a profile, or a file that describes one"
    ),
    _option(
        "state_dir", "flags.stateDir", places.STATE_DIR, values.path, "directory of what must outlive this process"
    ),
    _option(
        "http_address",
        "flags.httpAddress",
        "",
        values.listen_address,
        "HOST:PORT where probes (/livez, /readyz, /startupz) and /metrics are answered; empty: nowhere",
    ),
    _option("log_format", "flags.logFormat", "text", values.choice("text", "json"), "form of log lines, text or json"),
    _option(
        "log_level",
        "flags.logLevel",
        "info",
        values.choice("debug", "info", "warning", "error"),
        "lowest severity shown: debug, info, warning, error",
    ),
    _option(
        "health_poll_interval",
        "flags.healthPollInterval",
        "5s",
        values.duration(0.05, 3600),
        "interval between two looks at each GPU",
    ),
    _option(
        "temperature_recovery",
        "flags.temperatureRecovery",
        "5m",
        values.duration(0, 86400),
        "how long an overheated GPU must stay cool before it is Healthy again",
    ),
    _option(
        "nvml_timeout",
        "flags.nvmlTimeout",
        "30s",
        values.duration(0.1, 3600),
        "how long an NVML call may take before its GPU counts as hung",
    ),
    _option(
        "flap_guard",
        "flags.flapGuard",
        "1h",
        values.duration(0, 86400),
        "how long a GPU is held back that became unfit for the same reason three times within an hour; 0s: not at all",
    ),
    _option(
        "vanished_gpu_retention",
        "flags.vanishedGpuRetention",
        "24h",
        values.duration(1, 30 * 86400),
        "how long a GPU that is gone from the node stays listed, as unhealthy",
    ),
    _switch(
        "pod_metrics",
        "flags.podMetrics",
        True,
        "name the pods that hold devices in /metrics and on the status page, where the kubelet's PodResources service says so",
    ),
    _switch("status_page", "flags.statusPage", True, "serve the status page at / of the HTTP address"),
    _option(
        "status_page_hosts",
        "flags.statusPageHosts",
        "",
        values.host_names,
        "names under which the page is shown, besides localhost, the name of the node and all addresses; "
        "*.example.com for all below example.com",
    ),
    _switch(
        "node_events",
        "flags.nodeEvents",
        False,
        "write a Kubernetes Event on the Node when the health of a GPU changes",
    ),
    _switch("pod_events", "flags.podEvents", False, "write it also on the pods that hold the GPU"),
    _switch(
        "node_condition",
        "flags.nodeCondition",
        False,
        "keep the condition GPUHealthy on the Node, for people and remediation tools",
    ),
    _option(
        "node_taint",
        "flags.nodeTaint",
        "none",
        values.choice("none", "NoSchedule", "PreferNoSchedule", "NoExecute"),
        "effect of the taint nvidia.com/gpu-unhealthy that the Node has while a GPU is Unhealthy; none: no taint",
    ),
    _switch(
        "cordon_annotation",
        "flags.cordonAnnotation",
        False,
        "hold back the GPUs that the Node's annotation nvidia.com/gpu-plugin.cordon names",
    ),
    _option(
        "node_labels",
        "flags.nodeLabels",
        "none",
        values.choice("none", "file", "api"),
        "label the Node as GPU Feature Discovery does: by a file for Node Feature Discovery, by the Kubernetes API, or not",
    ),
    _option(
        "features_dir",
        "flags.featuresDir",
        settings.FEATURES_DIR,
        values.path,
        "where Node Feature Discovery reads the file of labels",
    ),
    _option(
        "event_loop",
        "flags.eventLoop",
        "asyncio",
        values.choice("asyncio", "uvloop"),
        "event loop: asyncio, or uvloop where the extra of that name is installed (a tenth faster, 2 MiB more)",
    ),
)

# Read from the environment alone, as NVIDIA's plugin does; the last as Google's does (container-engine-accelerators,
# cmd/nvidia_gpu).
_DISABLED = "Xids that are not faults: numbers, xids, or all"
_ENABLED = "Xids that are faults after all: numbers, or all"
_CRITICAL = "further Xids that are faults: numbers"
UNFLAGGED: tuple[Option, ...] = (
    Option("disable_healthchecks", (), ("DP_DISABLE_HEALTHCHECKS",), "", "", values.text, _DISABLED),
    Option("enable_healthchecks", (), ("DP_ENABLE_HEALTHCHECKS",), "", "", values.text, _ENABLED),
    Option("xid_config", (), ("XID_CONFIG",), "", "", values.text, _CRITICAL),
)


def settable(options: tuple[Option, ...]) -> tuple[Option, ...]:
    """The options that were given. Raises LookupError for one whose value has no place in `Settings`."""
    for option in options:
        if option.name not in settings.Settings.__annotations__:
            raise LookupError(
                f"the option {option.name!r} has no field: add it, with its type, to Settings in gpu_plugin/config/settings.py"
            )
    return options


OPTIONS = settable((*NVIDIA, *OURS, *UNFLAGGED))
