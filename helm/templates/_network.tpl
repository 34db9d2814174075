{{/* Every address of the pod, in the family of its cluster. */}}
{{- define "tandem.everyAddress" -}}
{{- ternary "::" "0.0.0.0" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{/* The pod's own address before a port. */}}
{{- define "tandem.podHost" -}}
{{- ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{/* Pods listen on their first address alone, so a Service has one family: with two, a router
  would take each pod for two nodes. */}}
{{- define "tandem.ipFamily" -}}
ipFamilyPolicy: SingleStack
ipFamilies: [{{ .Values.ipFamily }}]
{{- end -}}

{{/* Towards names and the collector of traces, and what the user adds: every component has it. */}}
{{- define "tandem.dnsEgress" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- include "tandem.tracesEgress" . }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Towards the hub, unless the checkpoint is in the volume. */}}
{{- define "tandem.hubEgress" -}}
{{- if not (or (include "tandem.modelIsLocal" .) (include "tandem.isPreloaded" .)) }}
- ports: [{port: 443}]
{{- end }}
{{- end -}}

{{/* Last port of the KV transfer processes of a prefill node: one for each rank and kvProcesses,
  of which a node chooses at most eight itself. */}}
{{- define "tandem.lastKvPort" -}}
{{- add (int .ports.kv) (mul (include "tandem.ranks" . | int) (int (default 8 .settings.kvProcesses))) -1 -}}
{{- end -}}

{{/* Whether a tier gives cached KV to prefill nodes. of */}}
{{- define "tandem.sharesPrefixes" -}}
{{- if ne (default "off" .of.settings.kvSharePrefixes) "off" -}}true{{- end -}}
{{- end -}}

{{/* Whether others fetch KV from a node: component, of */}}
{{- define "tandem.givesKv" -}}
{{- if ne .component "decode" -}}true{{- else -}}{{- include "tandem.sharesPrefixes" . -}}{{- end -}}
{{- end -}}

{{/* What is called on a node that others fetch KV from. */}}
{{- define "tandem.prefillPorts" -}}
- port: {{ int .ports.grpc }}
- port: {{ int .ports.kv }}
  endPort: {{ include "tandem.lastKvPort" . }}
{{- end -}}

{{/* Hosts of one node: Ray, collectives and queues, on many ports. Whoever reaches Ray can run
  programs, so only the tier itself does. of, peer, side (from or to) */}}
{{- define "tandem.groupPolicy" -}}
{{- if gt (int .of.parallelism.hosts) 1 }}
- {{ .side }}: {{- toYaml (list .peer) | nindent 4 }}
{{- end }}
{{- end -}}

{{/* Who is at the other end of a rule: pods of a component by their labels, which pods on the network
  of their host do not show; those have the address of any host, so that ports alone decide.
  side (from or to), peer, of (the tier, or nothing for the router) */}}
{{- define "tandem.policyPeer" -}}
{{- if not (include "tandem.isOnHost" (dict "of" (.of | default dict))) }}
{{ .side }}: {{- toYaml (list .peer) | nindent 2 }}
{{- end }}
{{- end -}}
