{{- /* What the pods of all three DaemonSets have. */}}
{{- define "nvidia-device-plugin.pod" -}}
priorityClassName: system-node-critical
securityContext: {}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
        - matchExpressions:
            - {key: feature.node.kubernetes.io/cpu-model.vendor_id, operator: In, values: [NVIDIA]}
        - matchExpressions:
            - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
tolerations:
  - {key: CriticalAddonsOnly, operator: Exists}
  - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
{{- end }}

{{- /* A container: a list of the root, its name, and the stand-in that it runs. */}}
{{- define "nvidia-device-plugin.container" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
image: {{ $root.Values.image.repository }}:{{ $root.Values.image.tag }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
command: [python3, /stand-in/{{ index . 2 }}.py]
{{- end }}

{{- /* The container that selects the config: a list of the root, its name, and whether it ends then. NVIDIA's image runs as root by
itself, the image of the stand-ins does not. */}}
{{- define "nvidia-device-plugin.configManager" -}}
{{- $root := index . 0 -}}
{{ include "nvidia-device-plugin.container" (list $root (index . 1) "config_manager") }}
env:
  - {name: ONESHOT, value: {{ index . 2 | quote }}}
  - {name: KUBECONFIG, value: ""}
  - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
  - {name: NODE_LABEL, value: nvidia.com/device-plugin.config}
  - {name: CONFIG_FILE_SRCDIR, value: /available-configs}
  - {name: CONFIG_FILE_DST, value: /config/config.yaml}
  - {name: DEFAULT_CONFIG, value: {{ $root.Values.config.default | quote }}}
  - {name: FALLBACK_STRATEGIES, value: {{ join "," $root.Values.config.fallbackStrategies | quote }}}
securityContext: {runAsUser: 0}
volumeMounts:
  - {name: available-configs, mountPath: /available-configs}
  - {name: config, mountPath: /config}
  - {name: stand-in, mountPath: /stand-in}
{{- end }}

{{- define "nvidia-device-plugin.mounts" -}}
- {name: stand-in, mountPath: /stand-in}
{{- if .Values.config.map }}
- {name: available-configs, mountPath: /available-configs}
- {name: config, mountPath: /config}
{{- end }}
{{- end }}

{{- define "nvidia-device-plugin.volumes" -}}
- {name: stand-in, configMap: {name: {{ include "nvidia-device-plugin.fullname" . }}-stand-in}}
{{- if .Values.config.map }}
- {name: available-configs, configMap: {name: {{ include "nvidia-device-plugin.fullname" . }}-configs}}
- {name: config, emptyDir: {}}
{{- end }}
{{- end }}
