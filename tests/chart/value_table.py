"""For each value of the chart: a value other than its default, and the fact that Helm must render for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chart.helm import at_path, overlaid

CONTAINER = "DaemonSet.spec.template.spec.containers.gpu-plugin"


@dataclass(frozen=True)
class Shown:
    """A value, where it shows (a part of a fact, see `helm.facts`), and the values without which it does nothing."""

    value: Any
    fact: str
    given: Mapping[str, Any] = field(default_factory=dict)


MPS_CONFIG = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
ALERTS = {"prometheusRule": {"enabled": True}}
ONE_CONFIG = {"config": {"map": {"only": "version: v1\n"}}}
MPS = {"config": {"map": {"default": MPS_CONFIG}}}
CDI = {"deviceListStrategy": "cdi-cri"}


def _variable(name: str, value: Any, shown: str = "", given: Mapping[str, Any] | None = None) -> Shown:
    return Shown(value, f"{CONTAINER}.env.{name}={shown or value}", given or {})


TABLE: Mapping[str, Shown] = {
    "image.repository": Shown("registry.example.com/gpu", f"{CONTAINER}.image=registry.example.com/gpu:0.1.0"),
    "image.tag": Shown("9.9", f"{CONTAINER}.image=gpu-plugin:9.9"),
    "image.pullPolicy": Shown("Never", f"{CONTAINER}.imagePullPolicy=Never"),
    "imagePullSecrets": Shown([{"name": "pull"}], "DaemonSet.spec.template.spec.imagePullSecrets.pull.name=pull"),
    "config.name": Shown("mine", "DaemonSet.spec.template.spec.volumes.configs.configMap.name=mine"),
    "config.map": Shown({"a": "version: v1\n"}, "ConfigMap.data.a=version: v1\n"),
    "config.default": Shown(
        "b", f"{CONTAINER}.env.DEFAULT_CONFIG=b", {"config": {"map": {"default": "version: v1", "b": "version: v1"}}}
    ),
    "config.fallbackStrategies": _variable("FALLBACK_STRATEGIES", ["empty"], "empty", ONE_CONFIG),
    "config.nodeLabel": _variable("NODE_LABEL", "example.com/config", given=ONE_CONFIG),
    "migStrategy": _variable("MIG_STRATEGY", "mixed"),
    "failOnInitError": _variable("FAIL_ON_INIT_ERROR", True, "true"),
    "deviceListStrategy": _variable("DEVICE_LIST_STRATEGY", ["cdi-cri", "envvar"], "cdi-cri,envvar"),
    "deviceIDStrategy": _variable("DEVICE_ID_STRATEGY", "index"),
    "nvidiaDriverRoot": Shown(
        "/run/nvidia/driver", "DaemonSet.spec.template.spec.volumes.driver-root.hostPath.path=/run/nvidia/driver"
    ),
    "nvidiaDevRoot": _variable("NVIDIA_DEV_ROOT", "/other"),
    "driverRootCtrPath": Shown(
        "/there", f"{CONTAINER}.volumeMounts.driver-root.mountPath=/there", {"nvidiaDriverRoot": "/"}
    ),
    "gdrcopyEnabled": _variable("GDRCOPY_ENABLED", "auto"),
    "gdsEnabled": _variable("GDS_ENABLED", True, "true"),
    "mofedEnabled": _variable("MOFED_ENABLED", "true"),
    "deviceDiscoveryStrategy": _variable("DEVICE_DISCOVERY_STRATEGY", "tegra"),
    "sharedDevicesAllocationPolicy": _variable("SHARED_DEVICES_ALLOCATION_POLICY", "packed"),
    "includeGPUs": _variable("INCLUDE_GPUS", ["0", "*H100*"], "0,*H100*"),
    "excludeGPUs": _variable("EXCLUDE_GPUS", ["1"], "1"),
    "passDeviceSpecs": _variable("PASS_DEVICE_SPECS", True, "true"),
    "compatWithCPUManager": Shown(True, f"{CONTAINER}.securityContext.privileged=true"),
    "simulate": _variable("SIMULATE", "hgx-h100"),
    "imex.channelIDs": _variable("IMEX_CHANNEL_IDS", [0], "0"),
    "imex.required": _variable("IMEX_REQUIRED", True, "true"),
    "cdi.nvidiaHookPath": _variable("NVIDIA_CDI_HOOK_PATH", "/usr/bin/nvidia-ctk"),
    "cdi.featureFlags": _variable("CDI_FEATURE_FLAGS", "disable-ipc-discoverer"),
    "cdi.disableHooks": _variable(
        "CDI_DISABLE_HOOKS", ["update-ldcache", "create-symlinks"], "update-ldcache,create-symlinks"
    ),
    "cdi.dir": Shown("/etc/cdi", "DaemonSet.spec.template.spec.volumes.cdi.hostPath.path=/etc/cdi", CDI),
    "cdi.annotationPrefix": _variable("CDI_ANNOTATION_PREFIX", "cdi.example.com/"),
    "cdi.removeOnExit": _variable("CDI_REMOVE_ON_EXIT", True, "true"),
    "health.pollInterval": _variable("HEALTH_POLL_INTERVAL", "7s"),
    "health.temperatureRecovery": _variable("TEMPERATURE_RECOVERY", "9m"),
    "health.flapGuard": _variable("FLAP_GUARD", "0s"),
    "health.nvmlTimeout": _variable("NVML_TIMEOUT", "45s"),
    "health.vanishedGPURetention": _variable("VANISHED_GPU_RETENTION", "48h"),
    "health.disableHealthchecks": _variable("DP_DISABLE_HEALTHCHECKS", "all"),
    "health.enableHealthchecks": _variable("DP_ENABLE_HEALTHCHECKS", [79, 48], "79,48"),
    "health.xidConfig": _variable("XID_CONFIG", 94),
    "mps.enabled": Shown(True, "DaemonSet.spec.template.spec.containers.mps.name=mps"),
    "mps.root": Shown("/var/mps", "DaemonSet.spec.template.spec.volumes.mps-shm.hostPath.path=/var/mps/shm", MPS),
    "mps.enableHostPID": Shown(False, "", MPS),
    "mps.enableHostNetwork": Shown(True, "DaemonSet.spec.template.spec.hostNetwork=true", MPS),
    "mps.resources": Shown(
        {"limits": {"memory": "1Gi"}}, "DaemonSet.spec.template.spec.containers.mps.resources.limits.memory=1Gi", MPS
    ),
    "http.enabled": Shown(False, ""),
    "http.port": Shown(9999, f"{CONTAINER}.env.HTTP_ADDRESS=$(POD_IP):9999"),
    "probes.enabled": Shown(False, ""),
    "probes.startup": Shown({"failureThreshold": 99}, f"{CONTAINER}.startupProbe.failureThreshold=99"),
    "probes.liveness": Shown({"periodSeconds": 77}, f"{CONTAINER}.livenessProbe.periodSeconds=77"),
    "probes.readiness": Shown({"initialDelaySeconds": 3}, f"{CONTAINER}.readinessProbe.initialDelaySeconds=3"),
    "http.statusPage": _variable("STATUS_PAGE", False, "false"),
    "http.statusPageHosts": _variable("STATUS_PAGE_HOSTS", ["gpus.example.com", "*.nodes"], "gpus.example.com,*.nodes"),
    "http.podMetrics": _variable("POD_METRICS", False, "false"),
    "prometheusRule.enabled": Shown(True, "PrometheusRule.spec.groups.gpu-plugin-gpus.rules.1.alert=GpuUnhealthy"),
    "prometheusRule.labels": Shown({"release": "prom"}, "PrometheusRule.metadata.labels.release=prom", ALERTS),
    "prometheusRule.alertLabels": Shown(
        {"team": "gpu"}, "PrometheusRule.spec.groups.gpu-plugin-nodes.rules.0.labels.team=gpu", ALERTS
    ),
    "prometheusRule.job": Shown(
        "node/gpu",
        'PrometheusRule.spec.groups.gpu-plugin-itself.rules.0.expr=max by (cluster, node) (up{job="node/gpu"}) == 0',
        ALERTS,
    ),
    "prometheusRule.documentation": Shown(
        "https://git.example.com/gpu/",
        "PrometheusRule.spec.groups.gpu-plugin-itself.rules.0.annotations.runbook_url="
        "https://git.example.com/gpu/docs/troubleshooting.md#gpuplugindown",
        ALERTS,
    ),
    "prometheusRule.disabled": Shown(
        ["GpuUnhealthy"], "PrometheusRule.spec.groups.gpu-plugin-gpus.rules.1.alert=GpuNodeUnhealthy", ALERTS
    ),
    "dashboard.enabled": Shown(True, "ConfigMap.metadata.labels.grafana_dashboard=1"),
    "dashboard.labels": Shown({"find": "me"}, "ConfigMap.metadata.labels.find=me", {"dashboard": {"enabled": True}}),
    "dashboard.annotations": Shown(
        {"grafana_folder": "GPUs"},
        "ConfigMap.metadata.annotations.grafana_folder=GPUs",
        {"dashboard": {"enabled": True}},
    ),
    "cluster.nodeEvents": _variable("NODE_EVENTS", True, "true"),
    "cluster.podEvents": _variable("POD_EVENTS", True, "true"),
    "cluster.nodeCondition": _variable("NODE_CONDITION", True, "true"),
    "cluster.nodeTaint": _variable("NODE_TAINT", "NoExecute"),
    "cluster.cordonAnnotation": _variable("CORDON_ANNOTATION", True, "true"),
    "cluster.nodeLabels": _variable("NODE_LABELS", "api"),
    "cluster.featuresDir": _variable("FEATURES_DIR", "/etc/features.d", given={"cluster": {"nodeLabels": "file"}}),
    "gfd": _variable("NODE_LABELS", {"enabled": True}, "file"),
    "podMonitor.enabled": Shown(True, "PodMonitor.spec.podMetricsEndpoints.0.port=http"),
    "podMonitor.labels": Shown(
        {"release": "prom"},
        "PodMonitor.metadata.labels.release=prom",
        {"podMonitor": {"enabled": True}, "commonAnnotations": {"a": "b"}},
    ),
    "podMonitor.interval": Shown(
        "15s", "PodMonitor.spec.podMetricsEndpoints.0.interval=15s", {"podMonitor": {"enabled": True}}
    ),
    "podMonitor.scrapeTimeout": Shown(
        "3s", "PodMonitor.spec.podMetricsEndpoints.0.scrapeTimeout=3s", {"podMonitor": {"enabled": True}}
    ),
    "networkPolicy.enabled": Shown(True, "NetworkPolicy.spec.policyTypes.1=Egress"),
    "networkPolicy.from": Shown(
        [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "NetworkPolicy.spec.ingress.0.from.0.namespaceSelector.matchLabels.name=monitoring",
        {"networkPolicy": {"enabled": True}},
    ),
    "networkPolicy.apiServerPorts": Shown(
        [16443], "NetworkPolicy.spec.egress.0.ports.0.port=16443", {"networkPolicy": {"enabled": True}} | ONE_CONFIG
    ),
    "log.format": _variable("LOG_FORMAT", "json"),
    "log.level": _variable("LOG_LEVEL", "debug"),
    "devicePlugin.enabled": Shown(False, ""),
    "devicePlugin.enableHostNetwork": Shown(True, "DaemonSet.spec.template.spec.dnsPolicy=ClusterFirstWithHostNet"),
    "kubelet.devicePluginDir": Shown(
        "/data/kubelet/device-plugins",
        "DaemonSet.spec.template.spec.volumes.device-plugins.hostPath.path=/data/kubelet/device-plugins",
    ),
    "kubelet.podResourcesDir": _variable(
        "POD_RESOURCES_SOCKET", "/data/kubelet/pod-resources", "/data/kubelet/pod-resources/kubelet.sock"
    ),
    "stateDir": Shown("/data/gpu", "DaemonSet.spec.template.spec.volumes.state.hostPath.path=/data/gpu"),
    "updateStrategy.type": Shown("OnDelete", "DaemonSet.spec.updateStrategy.type=OnDelete"),
    "updateStrategy.rollingUpdate": Shown(
        {"maxUnavailable": "10%"}, "DaemonSet.spec.updateStrategy.rollingUpdate.maxUnavailable=10%"
    ),
    "terminationGracePeriodSeconds": Shown(7, "DaemonSet.spec.template.spec.terminationGracePeriodSeconds=7"),
    "resources": Shown({"requests": {"cpu": "10m"}}, f"{CONTAINER}.resources.requests.cpu=10m"),
    "nodeSelector": Shown({"pool": "gpu"}, "DaemonSet.spec.template.spec.nodeSelector.pool=gpu"),
    "affinity": Shown(
        {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "DaemonSet.spec.template.spec.affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution=[]",
    ),
    "tolerations": Shown([{"key": "mine"}], "DaemonSet.spec.template.spec.tolerations.0.key=mine"),
    "priorityClassName": Shown("mine", "DaemonSet.spec.template.spec.priorityClassName=mine"),
    "runtimeClassName": Shown("nvidia", "DaemonSet.spec.template.spec.runtimeClassName=nvidia"),
    "privileged": Shown(True, f"{CONTAINER}.securityContext.privileged=true"),
    "securityContext": Shown({"runAsUser": 5}, f"{CONTAINER}.securityContext.runAsUser=5"),
    "podSecurityContext": Shown({"fsGroup": 6}, "DaemonSet.spec.template.spec.securityContext.fsGroup=6"),
    "nameOverride": Shown("other", "DaemonSet.metadata.name=try-other"),
    "fullnameOverride": Shown("whole", "DaemonSet.metadata.name=whole"),
    "namespaceOverride": Shown("elsewhere", "DaemonSet.metadata.namespace=elsewhere"),
    "selectorLabelsOverride": Shown({"app": "gpu"}, "DaemonSet.spec.selector.matchLabels.app=gpu"),
    "commonLabels": Shown({"team": "a"}, "ServiceAccount.metadata.labels.team=a"),
    "commonAnnotations": Shown({"note": "b"}, "ServiceAccount.metadata.annotations.note=b"),
    "podLabels": Shown({"kind": "c"}, "DaemonSet.spec.template.metadata.labels.kind=c"),
    "podAnnotations": Shown({"kind": "d"}, "DaemonSet.spec.template.metadata.annotations.kind=d"),
    "extraEnv": _variable("TZ", [{"name": "TZ", "value": "UTC"}], "UTC"),
    "extraArgs": Shown(["--kubeconfig=/k"], f"{CONTAINER}.args.1=--kubeconfig=/k"),
    "extraVolumes": Shown([{"name": "more", "emptyDir": {}}], "DaemonSet.spec.template.spec.volumes.more.emptyDir={}"),
    "extraVolumeMounts": Shown(
        [{"name": "more", "mountPath": "/more"}],
        f"{CONTAINER}.volumeMounts.more.mountPath=/more",
        {"extraVolumes": [{"name": "more", "emptyDir": {}}]},
    ),
    "uninstall.cleanup": Shown(False, ""),
    "uninstall.timeout": Shown("90s", "Job.spec.template.spec.containers.uninstall.args.3=--timeout=90s"),
    "test.resource": Shown(
        "nvidia.com/mig-1g.10gb", "Pod.spec.containers.test.resources.limits.nvidia.com/mig-1g.10gb=1"
    ),
}
"""By path. The fact is empty if the value removes something; see `TAKEN_AWAY`."""

TAKEN_AWAY = {
    "mps.enableHostPID": "DaemonSet.spec.template.spec.hostPID=true",
    "http.enabled": f"{CONTAINER}.ports.http.containerPort=9480",
    "probes.enabled": f"{CONTAINER}.livenessProbe.httpGet.path=/livez",
    "devicePlugin.enabled": f"{CONTAINER}.name=gpu-plugin",
    "uninstall.cleanup": "Job.spec.backoffLimit=1",
}
"""Facts that disappear, by path of a value that switches something off."""

WITHOUT_EFFECT = {
    "global": "what Helm hands to charts within charts",
    "allowDefaultNamespace": "NVIDIA's chart refuses the namespace default without it, this one takes it",
    "nfd": "named in the notes after an installation",
    "namespace": "refused",
    "enabled": "read by charts that depend on this one; false is refused",
    "legacyDaemonsetAPI": "of NVIDIA's chart 0.14; true is refused",
}
"""Values without an effect on objects, with the reason."""

COMBINATIONS: tuple[Mapping[str, Any], ...] = (
    {},
    MPS,
    MPS | {"mps": {"enabled": False}},
    MPS | {"nvidiaDriverRoot": "/", "deviceListStrategy": "auto"},
    MPS | {"simulate": "hgx-h100", "deviceListStrategy": "cdi-cri", "affinity": {}},
    MPS | {"imagePullSecrets": [{"name": "pull"}], "runtimeClassName": "nvidia", "podSecurityContext": {"fsGroup": 6}},
    MPS
    | {"extraEnv": [{"name": "A", "value": "b"}], "extraVolumeMounts": [{"name": "m", "mountPath": "/m"}]}
    | {"extraVolumes": [{"name": "m", "emptyDir": {}}], "podLabels": {"a": "b"}, "podAnnotations": {"c": "d"}},
    {"config": {"map": {"default": "version: v1\n", "shared": MPS_CONFIG}}},
    {"config": {"map": {"a": "version: v1\n", "shared": MPS_CONFIG}, "default": "a", "nodeLabel": "example.com/c"}},
    {"config": {"map": {"shared": MPS_CONFIG}, "fallbackStrategies": ["empty"]}, "affinity": {}},
    {"config": {"map": {"only": MPS_CONFIG}}},
    {"config": {"map": {"default": MPS_CONFIG, "b": "version: v1\n"}}},
    {"config": {"map": {"default": MPS_CONFIG, "b": "version: v1\n"}, "default": "b"}},
    {"config": {"map": {"default": MPS_CONFIG}, "fallbackStrategies": ["empty", "named", "single"]}},
    {"config": {"map": {"only": MPS_CONFIG}, "fallbackStrategies": ["empty", "single"]}},
    {"config": {"map": {"default": MPS_CONFIG}, "fallbackStrategies": ["named", "empty"]}},
    {"config": {"map": {"only": MPS_CONFIG}, "fallbackStrategies": ["single", "empty"]}},
    {"config": {"map": {"default": "version: v1\n", "b": MPS_CONFIG}, "default": "b"}},
    {"config": {"name": "mine"}},
    {"config": {"name": "mine"}, "mps": {"enabled": True}, "networkPolicy": {"enabled": True}},
    {"config": {"name": "mine"}, "mps": {"enabled": False}},
    {"config": {"map": {"a": {"version": "v1", "flags": {"migStrategy": "single"}}}}},
    {"config": {"map": {"a": "flags: {plugin: {deviceListStrategy: [envvar, volume-mounts]}}"}}},
    {"config": {"map": {"a": "flags: {plugin: {deviceListStrategy: cdi-annotations}}"}}},
    {"deviceListStrategy": "volume-mounts"},
    {"deviceListStrategy": "cdi-cri", "nvidiaDriverRoot": "/", "privileged": True},
    {"privileged": True},
    {"deviceListStrategy": "auto", "nvidiaDriverRoot": "/", "migStrategy": "mixed"},
    {"simulate": "a100-mig-mixed", "migStrategy": "mixed", "affinity": None},
    {"compatWithCPUManager": "true", "passDeviceSpecs": "false"},
    {"podMonitor": {"enabled": "true"}, "devicePlugin": {"enabled": False}},
    {"networkPolicy": {"enabled": True}, "http": {"enabled": "false"}},
    {"devicePlugin": {"enabled": False}, "mps": {"enabled": True}},
    {"gfd": {"enabled": True}, "nfd": {"enabled": True}},
    {"gfd": {"enabled": "true"}, "cluster": {"nodeLabels": "none"}},
    {
        "devicePlugin": {"enabled": False},
        "mps": {"enabled": True},
        "cluster": {
            "nodeEvents": True,
            "podEvents": True,
            "nodeCondition": True,
            "nodeTaint": "NoExecute",
            "cordonAnnotation": True,
        },
    },
    {"gfd": {"enabled": True}, "config": {"map": {"a": "flags: {nodeLabels: api}"}}},
    {"cluster": {"nodeEvents": "true", "podEvents": "false", "nodeCondition": True}},
    {"cluster": {"nodeTaint": "NoSchedule"}, "tolerations": None, "networkPolicy": {"enabled": True}},
    {"cluster": {"nodeTaint": "PreferNoSchedule", "cordonAnnotation": True}},
    {"cluster": {"nodeTaint": "none", "nodeLabels": "file"}},
    {"cluster": {"nodeLabels": "api"}} | MPS,
    {"config": {"map": {"a": "flags: {nodeEvents: true, podEvents: 'true'}", "b": "version: v1"}, "default": "a"}},
    {"config": {"map": {"a": {"flags": {"nodeTaint": "NoExecute", "nodeLabels": "file"}}}}},
    {"config": {"map": {"a": "flags: {nodeCondition: true, nodeLabels: api}"}}, "cluster": {"nodeLabels": "none"}},
    {"config": {"map": {"a": "flags: {nodeEvents: true}"}}, "cluster": {"nodeEvents": False}},
    {"config": {"name": "mine"}, "cluster": {"nodeCondition": True}},
    {
        "prometheusRule": {"enabled": True, "alertLabels": {"severity": "info"}, "documentation": "https://x.example"},
        "dashboard": {"enabled": "true", "labels": None},
        "commonLabels": {"a": "b"},
        "commonAnnotations": {"c": "d"},
    },
    {"prometheusRule": {"enabled": True}, "devicePlugin": {"enabled": False}},
    {"imagePullSecrets": [], "tolerations": None, "priorityClassName": None, "runtimeClassName": ""},
)
"""Values of several features in one installation."""


def values_of(path: str) -> dict[str, Any]:
    """Return the value of an entry together with the values that it needs."""
    shown = TABLE[path]
    return overlaid(shown.given, at_path(path, shown.value))


MATRIX: tuple[Mapping[str, Any], ...] = (
    *COMBINATIONS,
    *map(values_of, TABLE),
    {"fullnameOverride": "a" * 60},
    {"image": {"tag": f"1.0@sha256:{'0a' * 32}"}},
    {"image": {"tag": f"@sha256:{'0a' * 32}"}},
    {"stateDir": "/state"},  # its parent is the root of the node
    {"nameOverride": "try"},  # the release is called so
    {"extraEnv": [{"name": "STATE_DIR", "value": "/elsewhere"}]},  # in place of the chart's own
    {"imagePullSecrets": [{"name": "pull"}], "commonLabels": {"a": "b"}, "securityContext": {"runAsUser": 5}},
    {"securityContext": {"privileged": True}},  # as NVIDIA's users have it
    {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}},  # likewise
    {"securityContext": {"privileged": False}, "privileged": True},
    {"image": {"tag": 20261122}},
    {"updateStrategy": {"type": "OnDelete", "rollingUpdate": {"maxSurge": 0}}},
    {"podSecurityContext": {"runAsNonRoot": True}, "securityContext": {"runAsUser": 7}},
    {"securityContext": {"runAsNonRoot": True, "runAsUser": 7}},
    {"podSecurityContext": {"runAsNonRoot": True}, "securityContext": {"runAsNonRoot": False}},
)
"""Values for tests of rules that every installation must follow."""
