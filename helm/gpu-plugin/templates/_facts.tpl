{{- /*
What the values ask for, as a YAML mapping of booleans:
  configured: the node's label names a config file
  external:   config.name names a ConfigMap that the chart cannot look into
  mig, mps, cdi, volumeMounts: a value or a config asks for it, or a config that cannot be looked into may
  mpsDaemons: MPS control daemons are run
  nodeEvents, podEvents, nodeCondition, nodeTaint, cordonAnnotation, labelsByApi, labelsByFile: a value or else a config of config.map asks
              for it. No right in the cluster is given for what a config may say that cannot be looked into
  api:        the plugin asks or changes something in the Kubernetes API
and mpsNodes, which is configs: where it is not empty, the daemons run on the nodes whose label names one of these
*/}}
{{- define "gpu-plugin.facts" -}}
{{- $external := not (empty .Values.config.name) }}
{{- $mig := $external }}
{{- $mps := list }}
{{- $wanted := eq (toString .Values.mps.enabled) "true" }}
{{- $strategies := list .Values.deviceListStrategy }}
{{- $migStrategies := list .Values.migStrategy }}
{{- $flags := list }}
{{- range $name, $content := .Values.config.map }}
{{- $config := include "gpu-plugin.configFile" $content | fromYaml }}
{{- if $config.Error }}
{{- fail (printf "config.map.%s is not YAML: %s" $name $config.Error) }}
{{- end }}
{{- $migStrategies = append $migStrategies (($config.flags).migStrategy) }}
{{- $strategies = append $strategies ((($config.flags).plugin).deviceListStrategy) }}
{{- $flags = append $flags (default dict $config.flags) }}
{{- if (($config.sharing).mps) }}
{{- $mps = append $mps $name }}
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
{{- end }}
{{- $asked := list }}
{{- range $name := list "nodeEvents" "podEvents" "nodeCondition" "nodeTaint" "cordonAnnotation" "nodeLabels" }}
{{- $given := include "gpu-plugin.words" (index $.Values.cluster $name) }}
{{- if eq $name "nodeLabels" }}
{{- $given = include "gpu-plugin.nodeLabels" $ }}
{{- end }}
{{- $said := list (dict $name $given) }}
{{- range ternary $flags $said (eq $given "") }}
{{- $asked = append $asked (printf "%s=%s" $name (toString (get . $name))) }}
{{- end }}
{{- end }}
{{- $told := dict
  "nodeEvents" (list "nodeEvents=true")
  "podEvents" (list "podEvents=true")
  "nodeCondition" (list "nodeCondition=true")
  "nodeTaint" (list "nodeTaint=NoSchedule" "nodeTaint=PreferNoSchedule" "nodeTaint=NoExecute")
  "cordonAnnotation" (list "cordonAnnotation=true")
  "labelsByApi" (list "nodeLabels=api")
}}
{{- $configured := or $external (not (empty .Values.config.map)) }}
{{- $api := $configured }}
{{- range $fact, $words := $told }}
{{- $met := false }}
{{- range $words }}
{{- $met = or $met (has . $asked) }}
{{- end }}
{{- $api = or $api $met }}
{{ $fact }}: {{ $met }}
{{- end }}
api: {{ $api }}
labelsByFile: {{ has "nodeLabels=file" $asked }}
configured: {{ $configured }}
external: {{ $external }}
mig: {{ $mig }}
mps: {{ or $external $wanted (not (empty $mps)) }}
{{- if kindIs "invalid" .Values.mps.enabled }}
mpsDaemons: {{ or $external (not (empty $mps)) }}
mpsNodes: {{ ternary list $mps (has (include "gpu-plugin.defaultConfig" .) $mps) | toJson }}
{{- else }}
mpsDaemons: {{ $wanted }}
{{- end }}
cdi: {{ or $external (contains "cdi-" $words) (contains "auto" $words) }}
volumeMounts: {{ or $external (contains "volume-mounts" $words) }}
{{- end }}

{{- /* The name of the config that nodes without the label take; empty for none. */}}
{{- define "gpu-plugin.defaultConfig" -}}
{{- $names := keys (default dict .Values.config.map) }}
{{- $found := .Values.config.default }}
{{- range .Values.config.fallbackStrategies }}
{{- if and (not $found) (eq . "named") (has "default" $names) }}
{{- $found = "default" }}
{{- else if and (not $found) (eq . "single") (eq (len $names) 1) }}
{{- $found = first $names }}
{{- else if and (not $found) (eq . "empty") }}
{{- $found = "(none)" }}
{{- end }}
{{- end }}
{{- $found }}
{{- end }}

{{- /* How the node is labelled, where a value says so: gfd.enabled is how NVIDIA's chart asks for it. */}}
{{- define "gpu-plugin.nodeLabels" -}}
{{- $given := include "gpu-plugin.words" .Values.cluster.nodeLabels }}
{{- if and (eq $given "") (eq (toString (.Values.gfd).enabled) "true") }}file{{ else }}{{ $given }}{{ end }}
{{- end }}

{{- /* A config file as text, whether it was given as text or as a mapping. */}}
{{- define "gpu-plugin.configFile" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toYaml . }}{{ end }}
{{- end }}

{{- /* A value as the text of an environment variable: lists with commas, nothing for null. */}}
{{- define "gpu-plugin.words" -}}
{{- join "," . }}
{{- end }}
