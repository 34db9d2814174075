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
