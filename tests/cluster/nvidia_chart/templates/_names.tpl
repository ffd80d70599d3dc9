{{- define "nvidia-device-plugin.name" -}}
{{ default .Chart.Name .Values.nameOverride }}
{{- end }}

{{- define "nvidia-device-plugin.fullname" -}}
{{- $name := include "nvidia-device-plugin.name" . -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}{{ .Release.Name }}
{{- else }}{{ .Release.Name }}-{{ $name }}{{ end -}}
{{- end }}

{{- /* All three DaemonSets and all their pods have these, and select by nothing else. */}}
{{- define "nvidia-device-plugin.selectorLabels" -}}
app.kubernetes.io/name: {{ include "nvidia-device-plugin.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "nvidia-device-plugin.labels" -}}
helm.sh/chart: {{ include "nvidia-device-plugin.name" . }}-{{ .Chart.Version }}
{{ include "nvidia-device-plugin.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
