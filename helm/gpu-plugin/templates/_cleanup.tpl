{{- /* The name of the DaemonSet that cleans up after another: a list of the root and the suffix of the other's name. It fits a label. */}}
{{- define "gpu-plugin.cleanupName" -}}
{{- $name := printf "%s%s" (include "gpu-plugin.fullname" (index . 0)) (index . 1) }}
{{- printf "%s-cleanup" (include "gpu-plugin.cut" (list 55 $name)) }}
{{- end }}

{{- /*
The DaemonSet that `gpu-plugin uninstall` creates, on the same nodes, before it deletes another DaemonSet of the chart. Its pods
wait for the other's pod on their node to end, run `gpu-plugin cleanup`, and are Ready when that has succeeded. The other DaemonSet has it
as an annotation, so that both always belong to the same version and values. A mapping:
  root, facts
  suffix:       the suffix of the other's name
  podSpec:      the arguments of the definition podSpec after root and facts
  nodeSelector: the node selector of the other's pods
  command:      arguments of `gpu-plugin`: the verb and its flags
  flag:         the option that names the directory to remove
  directory:    this directory on the node
  volume:       the name of its volume
  mountPath:    the path of the directory in the other's pods
  propagation:  the mount propagation of the volume; empty for the default
  context:      the security context of the container that cleans up, as YAML
  directories:  more directories of the node with files to remove, by the names of their volumes
  resources:    the resources of its containers
*/}}
{{- define "gpu-plugin.cleanup" -}}
{{- $root := .root }}
{{- $values := $root.Values }}
{{- $name := include "gpu-plugin.cleanupName" (list $root .suffix) }}
{{- $label := dict "gpu-plugin/cleanup" $name }}
{{- /* The parent is mounted, because a mount point itself cannot be removed; but no pod gets the node's root. */}}
{{- $parent := dir (clean .directory) }}
{{- $command := .command }}
{{- $mountPath := .mountPath }}
{{- $hostPath := dict "path" .directory "type" "DirectoryOrCreate" }}
{{- if ne $parent "/" }}
{{- $mountPath = "/gpu-plugin-parent" }}
{{- $hostPath = dict "path" $parent "type" "Directory" }}
{{- $command = append $command (printf "%s=%s/%s" .flag $mountPath (base (clean .directory))) }}
{{- end }}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ $name | quote }}
  namespace: {{ include "gpu-plugin.namespace" $root | quote }}
  labels:
    {{- mergeOverwrite (include "gpu-plugin.labels" (list $root "cleanup") | fromYaml) $label | toYaml | nindent 4 }}
spec:
  selector:
    matchLabels:
      {{- toYaml $label | nindent 6 }}
  template:
    metadata:
      labels:
        {{- mergeOverwrite (include "gpu-plugin.podLabels" (list $root "cleanup") | fromYaml) $label | toYaml | nindent 8 }}
      {{- with mergeOverwrite (dict) (default dict $values.commonAnnotations) (default dict $values.podAnnotations) }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "gpu-plugin.podSpec" (concat (list $root .facts) .podSpec) | nindent 6 }}
      nodeSelector:
        {{- toYaml .nodeSelector | nindent 8 }}
      initContainers:
        - name: cleanup
          image: {{ include "gpu-plugin.image" $root | quote }}
          imagePullPolicy: {{ $values.image.pullPolicy | quote }}
          args: {{ toJson (concat $command (default list $values.extraArgs)) }}
          env:
            {{- include "gpu-plugin.environment" (list $root .facts "[]") | nindent 12 }}
          securityContext:
            {{- .context | nindent 12 }}
          {{- with .resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          volumeMounts:
            - name: {{ .volume }}
              mountPath: {{ $mountPath | quote }}
              {{- with .propagation }}
              mountPropagation: {{ . }}
              {{- end }}
            {{- range $volume, $directory := .directories }}
            - {name: {{ $volume }}, mountPath: {{ $directory | quote }}}
            {{- end }}
            {{- with $values.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      containers:
        - name: clean
          image: {{ include "gpu-plugin.image" $root | quote }}
          imagePullPolicy: {{ $values.image.pullPolicy | quote }}
          args: [cleanup, --stay]
          {{- with .resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          securityContext:
            {{- include "gpu-plugin.restricted" $root | nindent 12 }}
      volumes:
        - name: {{ .volume }}
          hostPath: {{ toJson $hostPath }}
        {{- range $volume, $directory := .directories }}
        - name: {{ $volume }}
          hostPath: {path: {{ $directory | quote }}, type: {{ ternary "Directory" "DirectoryOrCreate" (eq $volume "device-plugins") }}}
        {{- end }}
        {{- with $values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}
