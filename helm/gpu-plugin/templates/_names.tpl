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

{{- define "gpu-plugin.labels" -}}
{{ include "gpu-plugin.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Labels of pods: no version of the chart, so that a new chart alone restarts nothing. */}}
{{- define "gpu-plugin.podLabels" -}}
{{ include "gpu-plugin.selectorLabels" . }}
{{- with mergeOverwrite (dict) .Values.commonLabels .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Metadata of an object: a list of the root, the name's suffix, the component, and annotations. */}}
{{- define "gpu-plugin.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "gpu-plugin.fullname" $root }}{{ index . 1 }}
labels:
  {{- include "gpu-plugin.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 2 }}
{{- with mergeOverwrite (dict) $root.Values.commonAnnotations (index . 3) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
