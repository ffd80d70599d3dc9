{{- define "gpu-plugin.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "gpu-plugin.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 43 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 43 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 43 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "gpu-plugin.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{- define "gpu-plugin.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}

{{- /* The labels that select the pods of this release; each kind of pod has its component besides. */}}
{{- define "gpu-plugin.selectorLabels" -}}
{{- if .Values.selectorLabelsOverride }}
{{- toYaml .Values.selectorLabelsOverride }}
{{- else -}}
app.kubernetes.io/name: {{ include "gpu-plugin.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- end }}

{{- /* Labels of an object: a list of the root and the component. What pods are selected by cannot be changed by other labels. */}}
{{- define "gpu-plugin.labels" -}}
{{- $root := index . 0 }}
{{- $own := include "gpu-plugin.selectorLabels" $root | fromYaml }}
{{- $own = set $own "app.kubernetes.io/component" (index . 1) }}
{{- $own = set $own "app.kubernetes.io/version" $root.Chart.AppVersion }}
{{- $own = set $own "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- $own = set $own "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version) }}
{{- mergeOverwrite (dict) $root.Values.commonLabels $own | toYaml }}
{{- end }}

{{- /* Labels of pods, likewise: no version, so that a new version of the chart alone restarts nothing. */}}
{{- define "gpu-plugin.podLabels" -}}
{{- $root := index . 0 }}
{{- $own := include "gpu-plugin.selectorLabels" $root | fromYaml }}
{{- $own = set $own "app.kubernetes.io/component" (index . 1) }}
{{- mergeOverwrite (dict) $root.Values.commonLabels $root.Values.podLabels $own | toYaml }}
{{- end }}

{{- /* Metadata of an object: a list of the root, the name's suffix, the component, and annotations. */}}
{{- define "gpu-plugin.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "gpu-plugin.fullname" $root }}{{ index . 1 }}
labels:
  {{- include "gpu-plugin.labels" (list $root (index . 2)) | nindent 2 }}
{{- with mergeOverwrite (dict) $root.Values.commonAnnotations (index . 3) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
