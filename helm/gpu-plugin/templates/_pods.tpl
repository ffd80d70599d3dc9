{{- /* Environment of a container: a list of the root, the facts, and more variables as YAML. extraEnv wins: no name comes twice, which
an API server refuses. */}}
{{- define "gpu-plugin.environment" -}}
{{- $root := index . 0 }}
{{- $extra := default list $root.Values.extraEnv }}
{{- $replaced := list }}
{{- range $extra }}
{{- $replaced = append $replaced .name }}
{{- end }}
{{- $kept := list }}
{{- range concat (index . 2 | fromYamlArray) (include "gpu-plugin.variables" (list $root (index . 1)) | fromYamlArray) }}
{{- if not (has .name $replaced) }}
{{- $kept = append $kept . }}
{{- end }}
{{- end }}
{{- concat $kept $extra | toYaml }}
{{- end }}

{{- /* Where the plugin listens, as variables. */}}
{{- define "gpu-plugin.http" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HTTP_ADDRESS
  value: "$(POD_IP):{{ .Values.http.port }}"
{{- end }}

{{- /* Variables of the plugin and of the MPS daemons, from values: a list of the root and the facts. */}}
{{- define "gpu-plugin.variables" -}}
{{- $values := (index . 0).Values }}
{{- $facts := index . 1 }}
{{- range list
  (list "MIG_STRATEGY" $values.migStrategy)
  (list "FAIL_ON_INIT_ERROR" $values.failOnInitError)
  (list "NVIDIA_DRIVER_ROOT" $values.nvidiaDriverRoot)
  (list "NVIDIA_DEV_ROOT" $values.nvidiaDevRoot)
  (list "DRIVER_ROOT_CTR_PATH" $values.driverRootCtrPath)
  (list "PASS_DEVICE_SPECS" (ternary true $values.passDeviceSpecs (eq (toString $values.compatWithCPUManager) "true")))
  (list "DEVICE_LIST_STRATEGY" $values.deviceListStrategy)
  (list "DEVICE_ID_STRATEGY" $values.deviceIDStrategy)
  (list "DEVICE_DISCOVERY_STRATEGY" $values.deviceDiscoveryStrategy)
  (list "SHARED_DEVICES_ALLOCATION_POLICY" $values.sharedDevicesAllocationPolicy)
  (list "INCLUDE_GPUS" $values.includeGPUs)
  (list "EXCLUDE_GPUS" $values.excludeGPUs)
  (list "GDRCOPY_ENABLED" $values.gdrcopyEnabled)
  (list "GDS_ENABLED" $values.gdsEnabled)
  (list "MOFED_ENABLED" $values.mofedEnabled)
  (list "IMEX_CHANNEL_IDS" $values.imex.channelIDs)
  (list "IMEX_REQUIRED" $values.imex.required)
  (list "CDI_DIR" $values.cdi.dir)
  (list "CDI_ANNOTATION_PREFIX" $values.cdi.annotationPrefix)
  (list "CDI_FEATURE_FLAGS" $values.cdi.featureFlags)
  (list "CDI_DISABLE_HOOKS" $values.cdi.disableHooks)
  (list "CDI_REMOVE_ON_EXIT" $values.cdi.removeOnExit)
  (list "NVIDIA_CDI_HOOK_PATH" $values.cdi.nvidiaHookPath)
  (list "MPS_ROOT" (ternary $values.mps.root "" $facts.mps))
  (list "HEALTH_POLL_INTERVAL" $values.health.pollInterval)
  (list "TEMPERATURE_RECOVERY" $values.health.temperatureRecovery)
  (list "FLAP_GUARD" $values.health.flapGuard)
  (list "NVML_TIMEOUT" $values.health.nvmlTimeout)
  (list "VANISHED_GPU_RETENTION" $values.health.vanishedGPURetention)
  (list "DP_DISABLE_HEALTHCHECKS" $values.health.disableHealthchecks)
  (list "DP_ENABLE_HEALTHCHECKS" $values.health.enableHealthchecks)
  (list "XID_CONFIG" $values.health.xidConfig)
  (list "DEVICE_PLUGIN_DIR" $values.kubelet.devicePluginDir)
  (list "POD_RESOURCES_SOCKET" (printf "%s/kubelet.sock" (trimSuffix "/" $values.kubelet.podResourcesDir)))
  (list "STATE_DIR" $values.stateDir)
  (list "STATUS_PAGE" $values.http.statusPage)
  (list "STATUS_PAGE_HOSTS" $values.http.statusPageHosts)
  (list "POD_METRICS" $values.http.podMetrics)
  (list "NODE_EVENTS" $values.cluster.nodeEvents)
  (list "POD_EVENTS" $values.cluster.podEvents)
  (list "NODE_CONDITION" $values.cluster.nodeCondition)
  (list "NODE_TAINT" $values.cluster.nodeTaint)
  (list "CORDON_ANNOTATION" $values.cluster.cordonAnnotation)
  (list "NODE_LABELS" (include "gpu-plugin.nodeLabels" (index . 0)))
  (list "FEATURES_DIR" (ternary $values.cluster.featuresDir "" $facts.labelsByFile))
  (list "LOG_FORMAT" $values.log.format)
  (list "LOG_LEVEL" $values.log.level)
  (list "SIMULATE" $values.simulate)
  (list "CONFIG_FILE_SRCDIR" (ternary "/available-configs" "" $facts.configured))
  (list "DEFAULT_CONFIG" $values.config.default)
  (list "FALLBACK_STRATEGIES" (ternary $values.config.fallbackStrategies "" $facts.configured))
  (list "NODE_LABEL" $values.config.nodeLabel)
  (list "NVIDIA_VISIBLE_DEVICES" (ternary "" "all" (not (empty $values.simulate))))
  (list "NVIDIA_DRIVER_CAPABILITIES" (ternary "" "compute,utility" (not (empty $values.simulate))))
  (list "NVIDIA_MIG_MONITOR_DEVICES" (ternary "all" "" (and $facts.mig (empty $values.simulate))))
}}
{{- $text := include "gpu-plugin.words" (index . 1) }}
{{- if ne $text "" }}
- name: {{ index . 0 }}
  value: {{ $text | quote }}
{{- end }}
{{- end }}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}

{{- /* What both kinds of pods have of a pod's specification: a list of the root, the facts, whether they have a token for the Kubernetes
API, and configs, of which a node's label must name one if there are any. */}}
{{- define "gpu-plugin.podSpec" -}}
{{- $root := index . 0 }}
{{- $facts := index . 1 }}
{{- $configs := index . 3 -}}
serviceAccountName: {{ include "gpu-plugin.fullname" $root | quote }}
automountServiceAccountToken: {{ index . 2 }}
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $root.Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
terminationGracePeriodSeconds: {{ $root.Values.terminationGracePeriodSeconds }}
{{- with $root.Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := default list $root.Values.tolerations }}
{{- if $facts.nodeTaint }}
{{- /* NoExecute would end the plugin itself, which alone takes the taint away again. */}}
{{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu-unhealthy" "operator" "Exists") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- include "gpu-plugin.affinity" (list $root $configs) | nindent 2 }}
{{- end }}

{{- /* Unset: nodes with NVIDIA hardware; null or empty: all nodes of a known architecture; both with one of these configs, if there are
any; else as it was given. A list of the root and the configs. */}}
{{- define "gpu-plugin.affinity" -}}
{{- $values := (index . 0).Values }}
{{- if $values.affinity -}}
{{- toYaml $values.affinity }}
{{- else -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- if hasKey $values "affinity" }}
      - matchExpressions:
          {{- include "gpu-plugin.suitable" . | nindent 10 }}
      {{- else }}
      - matchExpressions:
          - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
          {{- include "gpu-plugin.suitable" . | nindent 10 }}
      - matchExpressions:
          - {key: feature.node.kubernetes.io/cpu-model.vendor_id, operator: In, values: [NVIDIA]}
          {{- include "gpu-plugin.suitable" . | nindent 10 }}
      - matchExpressions:
          - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
          {{- include "gpu-plugin.suitable" . | nindent 10 }}
      {{- end }}
{{- end }}
{{- end }}

{{- /* What every node must be: a list of the root and the configs. */}}
{{- define "gpu-plugin.suitable" -}}
- {key: kubernetes.io/arch, operator: In, values: [amd64, arm64]}
{{- with index . 1 }}
- {key: {{ default "nvidia.com/device-plugin.config" (index $ 0).Values.config.nodeLabel | quote }}, operator: In, values: {{ toJson . }}}
{{- end }}
{{- end }}

{{- /* Security context of the plugin's container: a list of the root and the facts. */}}
{{- define "gpu-plugin.securityContext" -}}
{{- $values := (index . 0).Values }}
{{- $facts := index . 1 }}
{{- $added := list }}
{{- if $values.simulate }}
{{- /* A simulated node makes device nodes for containers to see. */}}
{{- if $facts.cdi }}
{{- $added = append $added "MKNOD" }}
{{- end }}
{{- else if or $facts.mig $facts.volumeMounts }}
{{- /* NVIDIA's runtime gives access to MIG's monitoring, and under volume-mounts to any GPU, only to those who have it. */}}
{{- $added = append $added "SYS_ADMIN" }}
{{- end }}
{{- $given := default dict $values.securityContext }}
{{- $own := dict "runAsUser" 0 "runAsGroup" 0 "readOnlyRootFilesystem" true }}
{{- $asked := or (eq (toString $values.privileged) "true") (eq (toString $values.compatWithCPUManager) "true") }}
{{- /* A privileged container has every capability: an API server refuses one that cannot gain privileges. */}}
{{- if ternary $given.privileged $asked (hasKey $given "privileged") }}
{{- $own = set $own "privileged" true }}
{{- else }}
{{- $capabilities := dict "drop" (list "ALL") }}
{{- with $added }}
{{- $capabilities = set $capabilities "add" . }}
{{- end }}
{{- $own = set $own "allowPrivilegeEscalation" false }}
{{- $own = set $own "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- $own = set $own "capabilities" $capabilities }}
{{- end }}
{{- mergeOverwrite $own $given | toYaml }}
{{- end }}

{{- /* Security context of pods that need no rights: the hook and the test. */}}
{{- define "gpu-plugin.restricted" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
seccompProfile: {type: RuntimeDefault}
capabilities: {drop: [ALL]}
{{- end }}

{{- /* updateStrategy: (list root surges). Kubernetes takes only one of the two numbers, and has maxUnavailable 1 where none is given;
  maxUnavailable comes first, since the default has maxSurge. Where two pods cannot run beside each other, maxSurge counts as
  maxUnavailable. */}}
{{- define "gpu-plugin.updateStrategy" }}
{{- $strategy := deepCopy (index . 0).Values.updateStrategy }}
{{- with $strategy.rollingUpdate }}
{{- $unavailable := default 0 .maxUnavailable }}
{{- $surge := default 0 .maxSurge }}
{{- if not (has (toString $unavailable) (list "0" "0%")) }}
{{- $surge = 0 }}
{{- else if not (index $ 1) }}
{{- $unavailable = $surge }}
{{- $surge = 0 }}
{{- end }}
{{- $strategy = set $strategy "rollingUpdate" (dict "maxUnavailable" $unavailable "maxSurge" $surge) }}
{{- end }}
{{- toYaml $strategy }}
{{- end }}
