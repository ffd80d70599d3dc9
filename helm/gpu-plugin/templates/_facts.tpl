{{- /*
What the values ask for, as a YAML mapping of booleans:
  configured: the node's label names a config file
  external:   config.name names a ConfigMap that the chart cannot look into
  mig, mps, cdi, volumeMounts: a value or a config asks for it, or a config that cannot be looked into may
  mpsDaemons: MPS control daemons are run
*/}}
{{- define "gpu-plugin.facts" -}}
{{- $external := not (empty .Values.config.name) }}
{{- $mig := $external }}
{{- $mps := false }}
{{- $wanted := eq (toString .Values.mps.enabled) "true" }}
{{- $strategies := list .Values.deviceListStrategy }}
{{- $migStrategies := list .Values.migStrategy }}
{{- range $name, $content := .Values.config.map }}
{{- $config := include "gpu-plugin.configFile" $content | fromYaml }}
{{- if $config.Error }}
{{- fail (printf "config.map.%s is not YAML: %s" $name $config.Error) }}
{{- end }}
{{- $migStrategies = append $migStrategies (($config.flags).migStrategy) }}
{{- $strategies = append $strategies ((($config.flags).plugin).deviceListStrategy) }}
{{- if (($config.sharing).mps) }}
{{- $mps = true }}
{{- end }}
{{- end }}
{{- range $migStrategies }}
{{- if has . (list "single" "mixed") }}
{{- $mig = true }}
{{- end }}
{{- end }}
{{- $words := "" }}
{{- range $strategies }}
{{- $words = printf "%s,%s" $words (include "gpu-plugin.words" .) }}
{{- end -}}
configured: {{ or $external (not (empty .Values.config.map)) }}
external: {{ $external }}
mig: {{ $mig }}
mps: {{ or $mps $external $wanted }}
mpsDaemons: {{ if kindIs "invalid" .Values.mps.enabled }}{{ or $mps $external }}{{ else }}{{ $wanted }}{{ end }}
cdi: {{ or $external (contains "cdi-" $words) (contains "auto" $words) }}
volumeMounts: {{ or $external (contains "volume-mounts" $words) }}
{{- end }}

{{- /* A config file as text, whether it was given as text or as a mapping. */}}
{{- define "gpu-plugin.configFile" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toYaml . }}{{ end }}
{{- end }}

{{- /* A value as the text of an environment variable: lists with commas, nothing for null. */}}
{{- define "gpu-plugin.words" -}}
{{- join "," . }}
{{- end }}
