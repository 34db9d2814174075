{{- define "tandem.dnsEgress" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end -}}

{{/* Towards the hub, unless the checkpoint is in the volume; and what the user adds. */}}
{{- define "tandem.hubEgress" -}}
{{- if not (include "tandem.modelIsLocal" .) }}
- ports: [{port: 443}]
{{- end }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Hosts of one node: Ray, collectives and queues, on many ports. Whoever reaches Ray can run
  programs, so only the tier itself does. of, peer, side (from or to) */}}
{{- define "tandem.groupPolicy" -}}
{{- if gt (int .of.parallelism.hosts) 1 }}
- {{ .side }}: {{- toYaml (list .peer) | nindent 4 }}
{{- end }}
{{- end -}}
