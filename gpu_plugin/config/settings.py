"""The daemon's settings, and every option of `gpu-plugin run` as data."""

from functools import partial
from typing import Annotated, Any, get_args

import msgspec
from msgspec.structs import replace

from gpu_plugin.config import values
from gpu_plugin.config.choices import ALLOCATION_POLICIES, DEVICE_LIST_STRATEGIES, MIG_STRATEGIES, listed
from gpu_plugin.config.device_names import selected_gpus
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.places import STATE_DIR
from gpu_plugin.config.sharing import DISTRIBUTED, NamePattern, SharedResource, Verdicts
from gpu_plugin.config.values import Auto, Reading

# The kubelet's directory of device plugins. It does not depend on the kubelet's --root-dir (pkg/kubelet, DevicePluginPath).
DEVICE_PLUGIN_DIR = "/var/lib/kubelet/device-plugins"
CDI_DIR = "/var/run/cdi"  # of generated specifications (CDI specification; /etc/cdi is for files that people write)
FEATURES_DIR = "/etc/kubernetes/node-feature-discovery/features.d"  # NFD's local source reads it (source/local)

# Headings of help, in their order
HEADINGS = (
    "GPUs",
    "What a container gets",
    "CDI",
    "Driver and directories",
    "Health",
    "Configuration",
    "Logs and probes",
    "The Kubernetes Node",
)


class Option(msgspec.Struct, frozen=True):
    """One option."""

    name: str  # of the field of `Settings`
    heading: str  # in help; empty for an option without a flag
    flags: tuple[str, ...]  # without dashes; messages show the first
    envs: tuple[str, ...]  # environment variables in the order of priority
    file: str  # the dotted key in the config file; empty for an option without a key
    default: object  # as text or as true or false; None without a default
    parse: Reading[Any]
    help: str

    @property
    def switch(self) -> bool:
        """Whether the flag may be given without a value."""
        return self.parse in (values.boolean, values.boolean_or_auto)

    @property
    def many(self) -> bool:
        """Whether the flag may be repeated: its value is a list."""
        return any(form.get("type") == "array" for form in self.parse.schema.get("anyOf", ()))


_declared: list[Option] = []


def _option(
    heading: str, file: str, default: object, text: str, *, flags: tuple[str, ...] = (), envs: tuple[str, ...] = ()
) -> Any:
    """Declare an option, and return its default for the field of `Settings`.

    The flag has the name of the field, and the environment variables have the names of the flags, unless others are given. The
    field's type is annotated with the `Reading` of its values.
    """
    written = ",".join(default) if isinstance(default, tuple) else default
    if isinstance(default, float):
        written = values.spell_duration(default)
    _declared.append(Option("", heading, flags, envs, file, written, values.text, text))
    return default


def _named(settings: type[msgspec.Struct]) -> tuple[Option, ...]:
    """Return the declared options with their names. The first fields are the options' fields, in the same order."""
    named = []
    for field, each in zip(msgspec.structs.fields(settings), _declared, strict=False):
        flags = each.flags or (field.name.replace("_", "-"),)
        envs = each.envs or tuple(flag.replace("-", "_").upper() for flag in flags)
        parse = get_args(field.type)[1]
        named.append(replace(each, name=field.name, flags=flags if each.heading else (), envs=envs, parse=parse))
    return tuple(named)


_gpus, _container, _cdi, _directories, _health, _configuration, _logs, _node = (
    partial(_option, heading) for heading in HEADINGS
)
_variable = partial(_option, "")

Switch = Annotated[bool, values.boolean]
SwitchOrAuto = Annotated[bool | Auto, values.boolean_or_auto]
Text = Annotated[str, values.text]
Texts = Annotated[tuple[str, ...], values.texts]
Path = Annotated[str, values.path]
Root = Annotated[str, values.root]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every option under its own name, with its default. Durations are in seconds.

    The first options have the names and defaults of NVIDIA's plugin v0.20.0 (cmd/nvidia-device-plugin/main.go,
    api/config/v1/flags.go) and of its config-manager (cmd/config-manager/main.go), so that manifests and config files of NVIDIA's
    plugin work unchanged.

    """

    mig_strategy: Annotated[str, values.choice(*MIG_STRATEGIES)] = _gpus(
        "flags.migStrategy", "none", f"how MIG devices are offered: {listed(MIG_STRATEGIES)}"
    )
    fail_on_init_error: Switch = _gpus(
        "flags.failOnInitError", True, "exit when there is no driver or no GPU; false: keep looking for one"
    )
    driver_root: Root = _directories(
        "flags.nvidiaDriverRoot",
        "/",
        "root of the driver installation on the host",
        flags=("driver-root", "nvidia-driver-root"),
        envs=("NVIDIA_DRIVER_ROOT",),
    )
    dev_root: Annotated[str, values.optional_root] = _directories(
        "flags.nvidiaDevRoot",
        "",
        "root of /dev on the host; by default the driver root for the device nodes that are there, and / for the others",
        flags=("dev-root", "nvidia-dev-root"),
        envs=("NVIDIA_DEV_ROOT",),
    )
    pass_device_specs: Switch = _container(
        "flags.plugin.passDeviceSpecs", False, "list the device nodes in the answer to Allocate"
    )
    device_list_strategy: Annotated[tuple[str, ...], values.choices(*DEVICE_LIST_STRATEGIES, exclusive=values.AUTO)] = (
        _container(
            "flags.plugin.deviceListStrategy",
            ("envvar",),
            f"how the runtime is told of devices, one or several of {listed(DEVICE_LIST_STRATEGIES)}; "
            "auto: cdi-cri where kubelet and runtime are known to take CDI device names, else envvar",
        )
    )
    device_id_strategy: Annotated[str, values.choice("uuid", "index")] = _container(
        "flags.plugin.deviceIDStrategy", "uuid", "how devices are identified to the runtime"
    )
    gdrcopy_enabled: SwitchOrAuto = _container(
        "flags.gdrcopyEnabled", False, "give containers GDRCopy; auto: where its device nodes exist"
    )
    gds_enabled: SwitchOrAuto = _container(
        "flags.gdsEnabled", False, "give containers GPUDirect Storage; auto: where its device nodes exist"
    )
    mofed_enabled: SwitchOrAuto = _container(
        "flags.mofedEnabled", False, "give containers the MOFED devices; auto: where its device nodes exist"
    )
    cdi_annotation_prefix: Text = _cdi(
        "flags.plugin.cdiAnnotationPrefix", "cdi.k8s.io/", "prefix of the annotation key under cdi-annotations"
    )
    nvidia_cdi_hook_path: Annotated[str, values.optional_root] = _cdi(
        "flags.plugin.nvidiaCTKPath",
        "",
        "NVIDIA's hook on the host, nvidia-ctk or nvidia-cdi-hook, for CDI specifications with hooks; empty: they need none",
        flags=("nvidia-cdi-hook-path", "nvidia-ctk-path"),
    )
    driver_root_ctr_path: Path = _directories(
        "flags.plugin.containerDriverRoot",
        "/driver-root",
        "where the driver root is mounted for this process",
        flags=("driver-root-ctr-path", "container-driver-root"),
    )
    mps_root: Annotated[str, values.optional_path] = _container("flags.mpsRoot", "", "host directory of MPS pipes")
    shared_devices_allocation_policy: Annotated[str, values.choice(*ALLOCATION_POLICIES)] = _container(
        "flags.plugin.sharedDevicesAllocationPolicy",
        DISTRIBUTED,
        f"which GPUs shared devices are taken from: {listed(ALLOCATION_POLICIES)}",
    )
    device_discovery_strategy: Annotated[str, values.choice("auto", "nvml", "tegra")] = _gpus(
        "flags.deviceDiscoveryStrategy",
        "auto",
        "how GPUs are found: what suits the platform, by NVML, or as the one GPU of a Tegra",
    )
    imex_channel_ids: Annotated[tuple[int, ...] | Auto, values.imex_channels] = _container(
        "imex.channelIDs", (), "IMEX channels given to every container: none or 0; auto: 0 where its device node exists"
    )
    imex_required: Switch = _container("imex.required", False, "treat a missing IMEX channel as an error")
    kubelet_socket: Annotated[str | None, values.optional_path] = _directories(
        "",
        None,
        "the kubelet's registration socket; empty: serve without registering [default: kubelet.sock in the directory]",
    )
    config_file: Text = _configuration("", "", "settings as YAML or JSON, in NVIDIA's schema v1")
    cdi_feature_flags: Texts = _cdi(
        "",
        (),
        "NVIDIA's feature flags for CDI: no-additional-gids-for-device-nodes (no groups for DRM nodes), "
        "disable-ipc-discoverer (no sockets of the driver's daemons); others change nothing",
    )
    cdi_disable_hooks: Texts = _cdi("", (), "hooks of NVIDIA's to leave out, by name, or all")
    config_file_srcdir: Text = _configuration(
        "", "", "directory of settings files, of which the node's label names one"
    )
    default_config: Text = _configuration("", "", "the file in that directory for a node without the label")
    fallback_strategies: Annotated[tuple[str, ...], values.choices("named", "single", "empty")] = _configuration(
        "",
        ("named", "single"),
        "without a label or default: named (the file default), single (the only file), empty (no file); in order",
    )
    node_name: Text = _configuration("", "", "the Node whose label names the settings file")
    node_label: Annotated[str, values.label_key] = _configuration(
        "", "nvidia.com/device-plugin.config", "the label that names the settings file"
    )
    kubeconfig: Text = _configuration("", "", "how to reach the Kubernetes API [default: as a pod of the cluster]")
    # The options from here on are our own.
    device_plugin_dir: Annotated[str | None, values.path] = _directories(
        "flags.devicePluginDir", None, f"directory of kubelet.sock and of our sockets [default: {DEVICE_PLUGIN_DIR}]"
    )
    pod_resources_socket: Annotated[str | None, values.path] = _directories(
        "flags.podResourcesSocket",
        None,
        "where the kubelet says which devices pods hold "
        "[default: pod-resources/kubelet.sock beside the directory of device plugins]",
    )
    cdi_dir: Path = _cdi(
        "flags.plugin.cdiDir", CDI_DIR, "where CDI specifications are written for the container runtime to read"
    )
    cdi_remove_on_exit: Switch = _cdi(
        "flags.plugin.cdiRemoveOnExit",
        False,
        "remove the CDI specifications when told to stop: for uninstalling, since containers that restart need them",
    )
    include_gpus: Annotated[tuple[str, ...], selected_gpus] = _gpus(
        "selection.include",
        (),
        "serve only these GPUs: index, GPU-<uuid>, PCI bus id or model, in which * stands for any text",
    )
    exclude_gpus: Annotated[tuple[str, ...], selected_gpus] = _gpus(
        "selection.exclude", (), "serve all GPUs except these, named the same way"
    )
    simulate: Text = _gpus("", "", "serve a simulated node: the name of a profile, or a file that describes one")
    state_dir: Path = _directories("flags.stateDir", STATE_DIR, "directory of what must outlive this process")
    http_address: Annotated[str, values.listen_address] = _logs(
        "flags.httpAddress",
        "",
        "HOST:PORT where probes (/livez, /readyz, /startupz) and /metrics are answered; empty: nowhere",
    )
    log_format: Annotated[str, values.choice("text", "json")] = _logs(
        "flags.logFormat", "text", "form of log lines, text or json"
    )
    log_level: Annotated[str, values.choice("debug", "info", "warning", "error")] = _logs(
        "flags.logLevel", "info", "lowest severity shown: debug, info, warning, error"
    )
    health_poll_interval: Annotated[float, values.duration(0.05, 3600)] = _health(
        "flags.healthPollInterval", 5.0, "interval between two looks at each GPU"
    )
    temperature_recovery: Annotated[float, values.duration(0, 86400)] = _health(
        "flags.temperatureRecovery", 300.0, "how long an overheated GPU must stay cool before it is Healthy again"
    )
    nvml_timeout: Annotated[float, values.duration(0.1, 3600)] = _health(
        "flags.nvmlTimeout", 30.0, "how long an NVML call may take before its GPU counts as hung"
    )
    flap_guard: Annotated[float, values.duration(0, 86400)] = _health(
        "flags.flapGuard",
        3600.0,
        "how long a GPU is held back that became unfit for the same reason three times within an hour; 0s: not at all",
    )
    vanished_gpu_retention: Annotated[float, values.duration(1, 30 * 86400)] = _health(
        "flags.vanishedGpuRetention", 86400.0, "how long a GPU that is gone from the node stays listed, as unhealthy"
    )
    pod_metrics: Switch = _logs(
        "flags.podMetrics",
        True,
        "name the pods that hold devices in /metrics and on the status page, where the kubelet's PodResources service says so",
    )
    status_page: Switch = _logs("flags.statusPage", True, "serve the status page at / of the HTTP address")
    status_page_hosts: Annotated[tuple[str, ...], values.host_names] = _logs(
        "flags.statusPageHosts",
        (),
        "names under which the page is shown, besides localhost, the name of the node and all addresses; "
        "*.example.com for all below example.com",
    )
    node_events: Switch = _node(
        "flags.nodeEvents", False, "write a Kubernetes Event on the Node when the health of a GPU changes"
    )
    pod_events: Switch = _node("flags.podEvents", False, "write it also on the pods that hold the GPU")
    node_condition: Switch = _node(
        "flags.nodeCondition", False, "keep the condition GPUHealthy on the Node, for people and remediation tools"
    )
    node_taint: Annotated[str, values.choice("none", "NoSchedule", "PreferNoSchedule", "NoExecute")] = _node(
        "flags.nodeTaint",
        "none",
        "effect of the taint nvidia.com/gpu-unhealthy that the Node has while a GPU is Unhealthy; none: no taint",
    )
    cordon_annotation: Switch = _node(
        "flags.cordonAnnotation",
        False,
        "hold back the GPUs that the Node's annotation nvidia.com/gpu-plugin.cordon names",
    )
    node_labels: Annotated[str, values.choice("none", "file", "api")] = _node(
        "flags.nodeLabels",
        "none",
        "label the Node as GPU Feature Discovery does: by a file for Node Feature Discovery, by the Kubernetes API, or not",
    )
    features_dir: Path = _node(
        "flags.featuresDir", FEATURES_DIR, "where Node Feature Discovery reads the file of labels"
    )
    event_loop: Annotated[str, values.choice("asyncio", "uvloop")] = _logs(
        "flags.eventLoop",
        "asyncio",
        "event loop: asyncio, or uvloop where the extra of that name is installed (a tenth faster, 2 MiB more)",
    )
    # Only the environment has these, as in NVIDIA's plugin; the last as in Google's plugin (container-engine-accelerators,
    # cmd/nvidia_gpu).
    disable_healthchecks: Text = _variable(
        "", "", "Xids that are not faults: numbers, xids, or all", envs=("DP_DISABLE_HEALTHCHECKS",)
    )
    enable_healthchecks: Text = _variable(
        "", "", "Xids that are faults after all: numbers, or all", envs=("DP_ENABLE_HEALTHCHECKS",)
    )
    xid_config: Text = _variable("", "", "further Xids that are faults: numbers", envs=("XID_CONFIG",))
    # Only the config file has these, in the file's order. The first matching pattern counts.
    sharing: tuple[SharedResource, ...] = ()
    gpu_names: tuple[NamePattern, ...] = ()  # of whole GPUs by model
    mig_names: tuple[NamePattern, ...] = ()  # of MIG devices by profile
    verdicts: Verdicts = Verdicts()
    # The other fields are not options.
    device_list_strategy_reason: str = (
        ""  # why the node's files led to the strategy; empty if the operator names strategies
    )
    remarks: tuple[Fault, ...] = ()  # which are no errors
    without_effect: tuple[Fault, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Whether the settings are equal apart from remarks."""
        if not isinstance(other, Settings):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED_FIELDS)

    __hash__ = None  # type: ignore[assignment]

    @property
    def socket_dir(self) -> str:
        """The directory of kubelet.sock and of our own sockets."""
        if self.device_plugin_dir is not None:
            return self.device_plugin_dir
        if self.kubelet_socket:
            return self.kubelet_socket.rpartition("/")[0] or "/"
        return DEVICE_PLUGIN_DIR

    @property
    def registration_socket(self) -> str:
        """The kubelet's registration socket; empty if the operator has disabled the registration."""
        return f"{self.socket_dir}/kubelet.sock" if self.kubelet_socket is None else self.kubelet_socket

    @property
    def effective_pod_resources_socket(self) -> str:
        """The socket of the kubelet's PodResources service: by default in the parent of the directory of device plugins."""
        if self.pod_resources_socket is not None:
            return self.pod_resources_socket
        return f"{self.socket_dir.rstrip('/').rpartition('/')[0]}/pod-resources/kubelet.sock"


class SettingsStore:
    """Stores the settings in force as `current`. A new configuration replaces all of them."""

    def __init__(self, settings: Settings) -> None:
        self.current = settings


OPTIONS = _named(Settings)
DEFAULTS = Settings()

_COMPARED_FIELDS = tuple(name for name in Settings.__struct_fields__ if name not in {"remarks", "without_effect"})
