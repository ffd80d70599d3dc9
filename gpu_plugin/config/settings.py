"""The daemon's settings, resolved."""

import msgspec

from gpu_plugin.config.errors import Fault
from gpu_plugin.config.sharing import NamePattern, SharedResource
from gpu_plugin.config.values import Auto
from gpu_plugin.config.verdicts import Verdicts

DEVICE_PLUGIN_DIR = "/var/lib/kubelet/device-plugins"
"""Where the kubelet looks for device plugins, whatever its own --root-dir (pkg/kubelet, DevicePluginPath)."""

CDI_DIR = "/var/run/cdi"
"""Where container runtimes look for CDI specifications that come and go (its specification; /etc/cdi is for people's)."""

FEATURES_DIR = "/etc/kubernetes/node-feature-discovery/features.d"
"""Where Node Feature Discovery's worker reads files of features, its local source (source/local)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every option under its own name; durations are in seconds. Defaults are those of `options.OPTIONS`.

    `sharing` to `verdicts` stand in the config file alone. The first three of them are in the file's order: what is shared,
    and the names of whole GPUs by model and of MIG devices by profile, of which the first that matches counts. The fourth is
    what Xids and health signals mean by the operator's word.

    `device_list_strategy_reason` is no option. Where the operator leaves the strategy to the node, `device_list_strategy` is
    what was chosen once the node was looked at, and this is why; empty where the operator names strategies.
    """

    mig_strategy: str
    fail_on_init_error: bool
    driver_root: str
    dev_root: str
    pass_device_specs: bool
    device_list_strategy: tuple[str, ...]
    device_id_strategy: str
    gdrcopy_enabled: bool | Auto
    gds_enabled: bool | Auto
    mofed_enabled: bool | Auto
    cdi_annotation_prefix: str
    nvidia_cdi_hook_path: str
    driver_root_ctr_path: str
    mps_root: str
    shared_devices_allocation_policy: str
    device_discovery_strategy: str
    imex_channel_ids: tuple[int, ...] | Auto
    imex_required: bool
    kubelet_socket: str | None
    device_plugin_dir: str | None
    config_file: str
    cdi_feature_flags: tuple[str, ...]
    cdi_disable_hooks: tuple[str, ...]
    config_file_srcdir: str
    default_config: str
    fallback_strategies: tuple[str, ...]
    node_name: str
    node_label: str
    kubeconfig: str
    pod_resources_socket: str | None
    cdi_dir: str
    cdi_remove_on_exit: bool
    include_gpus: tuple[str, ...]
    exclude_gpus: tuple[str, ...]
    simulate: str
    state_dir: str
    http_address: str
    log_format: str
    log_level: str
    health_poll_interval: float
    temperature_recovery: float
    nvml_timeout: float
    flap_guard: float
    vanished_gpu_retention: float
    pod_metrics: bool
    status_page: bool
    status_page_hosts: tuple[str, ...]
    node_events: bool
    pod_events: bool
    node_condition: bool
    node_taint: str
    cordon_annotation: bool
    node_labels: str
    features_dir: str
    event_loop: str
    disable_healthchecks: str
    enable_healthchecks: str
    xid_config: str
    sharing: tuple[SharedResource, ...] = ()
    gpu_names: tuple[NamePattern, ...] = ()
    mig_names: tuple[NamePattern, ...] = ()
    verdicts: Verdicts = msgspec.field(default_factory=Verdicts)
    device_list_strategy_reason: str = ""
    remarks: tuple[Fault, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Whether they ask for the same, whatever there is to remark on how they were written."""
        if not isinstance(other, Settings):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED_FIELDS)

    __hash__ = None  # type: ignore[assignment]

    @property
    def socket_dir(self) -> str:
        """The directory of kubelet.sock and of our own sockets: both always lie side by side."""
        if self.device_plugin_dir is not None:
            return self.device_plugin_dir
        if self.kubelet_socket:
            return self.kubelet_socket.rpartition("/")[0] or "/"
        return DEVICE_PLUGIN_DIR

    @property
    def registration_socket(self) -> str:
        """The kubelet's registration socket; empty where the operator asked for no registration."""
        return f"{self.socket_dir}/kubelet.sock" if self.kubelet_socket is None else self.kubelet_socket

    @property
    def effective_pod_resources_socket(self) -> str:
        """The socket of the kubelet's PodResources service: under the kubelet's own directory, the parent of the plugins'."""
        if self.pod_resources_socket is not None:
            return self.pod_resources_socket
        return f"{self.socket_dir.rstrip('/').rpartition('/')[0]}/pod-resources/kubelet.sock"

    @property
    def effective_dev_root(self) -> str:
        """The host directory whose /dev holds the device nodes: the driver root unless told otherwise."""
        return self.dev_root or self.driver_root


_COMPARED_FIELDS = tuple(name for name in Settings.__struct_fields__ if name != "remarks")
