{{/* What all pods share, at the level of a pod's spec: root, component, settings of scheduling */}}
{{- define "tandem.podCommon" -}}
serviceAccountName: {{ include "tandem.serviceAccountName" . | quote }}
# A Service named tandem-router would put TANDEM_ROUTER_PORT into every container, which is one of
# our own settings.
enableServiceLinks: false
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .of.podSecurityContext | nindent 2 }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with include "tandem.schedulerName" . }}
schedulerName: {{ . | quote }}
{{- end }}
{{- include "tandem.schedulingGroup" . }}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "tandem.affinity" . }}
{{- include "tandem.spread" . }}
{{- include "tandem.hostNetwork" . }}
{{- include "tandem.resourceClaims" . }}
{{- end -}}

{{/* Both tiers in one domain, if a key is given; the user's own rules win. */}}
{{- define "tandem.affinity" -}}
{{- if .of.affinity }}
affinity: {{- toYaml .of.affinity | nindent 2 }}
{{- else if .of.topology.colocateKey }}
affinity:
  podAffinity:
    {{- $term := dict "topologyKey" .of.topology.colocateKey "labelSelector" (dict
          "matchLabels" (fromYaml (include "tandem.selectorLabels" (dict "root" .root)))
          "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "In" "values" (list (include "tandem.componentLabel" (dict "root" .root "component" "prefill")) (include "tandem.componentLabel" (dict "root" .root "component" "decode")))))) }}
    {{- if .of.topology.colocateRequired }}
    requiredDuringSchedulingIgnoredDuringExecution: {{- toYaml (list $term) | nindent 6 }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution: {{- toYaml (list (dict "weight" 100 "podAffinityTerm" $term)) | nindent 6 }}
    {{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.spread" -}}
{{- with .of.topology.spreadKey }}
topologySpreadConstraints:
{{- range ternary . (list .) (kindIs "slice" .) }}
  - topologyKey: {{ . | quote }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tandem.selectorLabels" (dict "root" $.root "component" $.component) | nindent 8 }}
    {{- if not (or $.part (include "tandem.isRole" $)) }}
    # Each version of the pods spreads on its own: old ones that still drain do not count.
    matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.podLabels" -}}
{{ include "tandem.selectorLabels" . }}
{{- if and (has .component (list "prefill" "decode")) (ne .part "worker") }}
# What endpoint pickers of gateways look for.
llm-d.ai/inference-serving: "true"
llm-d.ai/role: {{ .component }}
{{- end }}
{{- with .of.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The pod's own address, which it listens on: nothing binds to every interface. */}}
{{- define "tandem.podIp" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end -}}
