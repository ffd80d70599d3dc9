{{- define "gpu-plugin.name" -}}
{{- include "gpu-plugin.cut" (list 63 (default .Chart.Name .Values.nameOverride)) }}
{{- end }}

{{- define "gpu-plugin.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- include "gpu-plugin.cut" (list 43 .Values.fullnameOverride) }}
{{- else if contains $name .Release.Name }}
{{- include "gpu-plugin.cut" (list 43 .Release.Name) }}
{{- else }}
{{- include "gpu-plugin.cut" (list 43 (printf "%s-%s" .Release.Name $name)) }}
{{- end }}
{{- end }}

{{- /* The name of what belongs to no namespace: that of another namespace's release is another. No other name has a colon. */}}
{{- define "gpu-plugin.clusterName" -}}
{{- printf "%s:%s" (include "gpu-plugin.namespace" .) (include "gpu-plugin.fullname" .) }}
{{- end }}

{{- /* A list of a length and a text: the beginning of the text, as a name may end. */}}
{{- define "gpu-plugin.cut" -}}
{{- regexReplaceAll "[-._]+$" (trunc (index . 0) (index . 1)) "" }}
{{- end }}

{{- define "gpu-plugin.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{- define "gpu-plugin.image" -}}
{{- $tag := .Values.image.tag }}
{{- /* Numbers as JSON has them: YAML's 20261122 would come as 2.0261122e+07. */}}
{{- if not (or (kindIs "string" $tag) (kindIs "invalid" $tag)) }}
{{- $tag = toJson $tag }}
{{- end }}
{{- $tag = default .Chart.AppVersion $tag }}
{{- printf "%s%s%s" .Values.image.repository (ternary "" ":" (hasPrefix "@" $tag)) $tag }}
{{- end }}

{{- /* The labels that select the pods of this release; each kind of pod has its component besides. */}}
{{- define "gpu-plugin.selectorLabels" -}}
{{- if .Values.selectorLabelsOverride }}
{{- toYaml .Values.selectorLabelsOverride }}
{{- else -}}
app.kubernetes.io/name: {{ include "gpu-plugin.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}
{{- end }}

{{- /* Labels of an object: a list of the root and the component. What pods are selected by cannot be changed by other labels. */}}
{{- define "gpu-plugin.labels" -}}
{{- $root := index . 0 }}
{{- $own := include "gpu-plugin.selectorLabels" $root | fromYaml }}
{{- $own = set $own "app.kubernetes.io/component" (index . 1) }}
{{- $own = set $own "app.kubernetes.io/version" (include "gpu-plugin.version" $root.Chart.AppVersion) }}
{{- $own = set $own "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- $own = set $own "helm.sh/chart" (include "gpu-plugin.version" (printf "%s-%s" $root.Chart.Name $root.Chart.Version)) }}
{{- mergeOverwrite (dict) (default dict $root.Values.commonLabels) $own | toYaml }}
{{- end }}

{{- /* A version as the value of a label, which may have no plus sign. */}}
{{- define "gpu-plugin.version" -}}
{{- include "gpu-plugin.cut" (list 63 (replace "+" "_" .)) }}
{{- end }}

{{- /* Labels of pods, likewise: no version, so that a new version of the chart alone restarts nothing. */}}
{{- define "gpu-plugin.podLabels" -}}
{{- $root := index . 0 }}
{{- $own := include "gpu-plugin.selectorLabels" $root | fromYaml }}
{{- $own = set $own "app.kubernetes.io/component" (index . 1) }}
{{- mergeOverwrite (dict) (default dict $root.Values.commonLabels) (default dict $root.Values.podLabels) $own | toYaml }}
{{- end }}

{{- /* Metadata of an object: a list of the root, the name's suffix, the component, and annotations. */}}
{{- define "gpu-plugin.metadata" -}}
{{- $root := index . 0 -}}
name: {{ printf "%s%s" (include "gpu-plugin.fullname" $root) (index . 1) | quote }}
labels:
  {{- include "gpu-plugin.labels" (list $root (index . 2)) | nindent 2 }}
{{- with mergeOverwrite (dict) (default dict $root.Values.commonAnnotations) (index . 3) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
