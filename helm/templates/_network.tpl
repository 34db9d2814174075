{{/* Every address of a router's pod: `::` is those of both families. */}}
{{- define "tandem.everyAddress" -}}
{{- $isBoth := ne .Values.router.service.ipFamilyPolicy "SingleStack" -}}
{{- ternary "::" "0.0.0.0" (or $isBoth (eq .Values.ipFamily "IPv6")) -}}
{{- end -}}

{{/* The pod's own address before a port. */}}
{{- define "tandem.podHost" -}}
{{- ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{/* Nodes listen on the first address of their pods alone, so their Services have one family: with two, a
  router would ask half of the addresses in vain. */}}
{{- define "tandem.ipFamily" -}}
ipFamilyPolicy: SingleStack
ipFamilies: [{{ .Values.ipFamily }}]
{{- end -}}

{{/* Towards names and the collector of traces, and what the user adds: every component has it. */}}
{{- define "tandem.dnsEgress" -}}
# DNS. Policies see the pods' port, which on OpenShift is 5353.
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}, {port: 5353, protocol: UDP}, {port: 5353, protocol: TCP}]
{{- include "tandem.tracesEgress" . }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* From what the user adds: every component but the download has it. */}}
{{- define "tandem.extraIngress" -}}
{{- with .Values.networkPolicy.extraIngress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The port that a URL names, else that of its scheme. */}}
{{- define "tandem.urlPort" -}}
{{- $url := urlParse . -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) -}}
{{- default (ternary "443" "80" (has $url.scheme (list "https" "grpcs"))) $port -}}
{{- end -}}

{{/* Towards the hub, unless the volume has the checkpoint already: root, tiers (whose `env` may name a
  mirror or a proxy) */}}
{{- define "tandem.hubEgress" -}}
{{- if not (or (include "tandem.modelIsReadOnly" .root) (include "tandem.isPreloaded" .root)) }}
- ports: {{ include "tandem.hubPorts" . }}
{{- end }}
{{- end -}}

{{- define "tandem.hubPorts" -}}
{{- $urls := list (default "https://huggingface.co" .root.Values.model.hub.endpoint) -}}
{{- range .tiers -}}
{{- range .env -}}
{{- if and .value (has (upper .name) (list "HF_ENDPOINT" "HTTPS_PROXY" "HTTP_PROXY" "ALL_PROXY")) -}}
{{- $urls = append $urls .value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ports := list -}}
{{- range $urls -}}{{- $ports = append $ports (printf "{port: %s}" (include "tandem.urlPort" .)) -}}{{- end -}}
[{{ join ", " ($ports | uniq) }}]
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
