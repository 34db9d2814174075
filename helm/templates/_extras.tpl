{{/* What a user adds to our pods: containers beside ours, arguments and variables of ours. */}}

{{/* Init containers, and sidecars, which start before our container and end after it: of */}}
{{- define "tandem.initContainers" -}}
{{- $found := .of.initContainers | default list -}}
{{- if and (ne .component "router") (include "tandem.isPreloaded" .root) -}}
{{- $found = concat $found (include "tandem.preloadWait" . | fromYamlArray) -}}
{{- end -}}
{{- range .of.sidecars -}}
{{- $found = append $found (merge (dict "restartPolicy" "Always") .) -}}
{{- end -}}
{{- with $found }}
initContainers: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.extraContainers" -}}
{{- with .of.extraContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.envFrom" -}}
{{- with .of.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.extraArgs" -}}
{{- range .of.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}
