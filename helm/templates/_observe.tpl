{{/* What every service tells, as settings; those of a tier or of the router win. */}}
{{- define "tandem.observeSettings" -}}
{{- $traces := .Values.monitoring.traces -}}
{{- $logs := .Values.monitoring.logs -}}
{{- if ne $logs.format "text" }}
logFormat: {{ $logs.format }}
{{- end }}
{{- if $logs.requests }}
logRequests: true
{{- end }}
{{- with $traces.endpoint }}
otlpTracesEndpoint: {{ . | quote }}
traceSampleRatio: {{ $traces.sampleRatio }}
{{- end }}
{{- end -}}

{{/* Flags of `settings` and of what every service tells. root, settings */}}
{{- define "tandem.serviceFlags" -}}
{{- $all := fromYaml (include "tandem.observeSettings" .root) -}}
{{- include "tandem.overlay" (dict "base" $all "over" .settings) -}}
{{- include "tandem.flags" $all -}}
{{- end -}}

{{/* By which spans name their pod: resource attributes k8s.*. On the network of a host, where a pod has
  the host's name, by which nodes name it to routers, too. root, name (of the container), isOnHost */}}
{{- define "tandem.tracesEnv" -}}
{{- if and .isOnHost (not .root.Values.monitoring.traces.endpoint) }}
- name: K8S_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end }}
{{- if .root.Values.monitoring.traces.endpoint }}
{{- range $name, $path := dict "K8S_POD_NAME" "metadata.name" "K8S_POD_UID" "metadata.uid" "K8S_NAMESPACE_NAME" "metadata.namespace" "K8S_NODE_NAME" "spec.nodeName" }}
- name: {{ $name }}
  valueFrom:
    fieldRef:
      fieldPath: {{ $path }}
{{- end }}
- name: K8S_CONTAINER_NAME
  value: {{ .name }}
{{- end }}
{{- end -}}

{{/* Towards the collector of traces, on the port that its pods have. */}}
{{- define "tandem.tracesEgress" -}}
{{- with .Values.monitoring.traces }}
{{- if .endpoint }}
- ports: [{port: {{ include "tandem.urlPort" .endpoint }}}]
  {{- with .collector }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}
