{{/* Groups of pods, each of which is one node: of a LeaderWorkerSet, or of a role of a DisaggregatedSet. */}}

{{/* Spec of a LeaderWorkerSet, but for the number of groups: root, component, of */}}
{{- define "tandem.groupSpec" -}}
{{- $tier := .of -}}
# Leaders are ready only when their workers have joined: waiting for them would be for ever.
startupPolicy: LeaderCreated
# Workers find their leader by name before it is ready. The Service that the operator makes for
# that would be called as ours, which has ready pods alone; so each group gets one of its own.
networkConfig: {subdomainPolicy: UniquePerReplica}
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration: {{- toYaml $tier.strategy | nindent 4 }}
leaderWorkerTemplate:
  size: {{ int $tier.parallelism.hosts }}
  # A rank that is lost takes its node's KV along: the group begins anew.
  restartPolicy: RecreateGroupOnPodRestart
  {{- if eq (int $tier.parallelism.hosts) 1 }}
  workerTemplate: {{- include "tandem.tierPod" . | nindent 4 }}
  {{- else }}
  leaderTemplate: {{- include "tandem.tierPod" (merge (dict "part" "leader") .) | nindent 4 }}
  workerTemplate: {{- include "tandem.tierPod" (merge (dict "part" "worker") .) | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Name of a model's DisaggregatedSet: at most 28 characters, since its operator appends slice,
  revision and role, and Kubernetes a hash. root */}}
{{- define "tandem.setName" -}}
{{- $name := include "tandem.name" (dict "root" .root "component" "decode") | trimSuffix "-decode" -}}
{{- if gt (len $name) 28 -}}
{{- $name = printf "%s-%s" ($name | trunc 21 | trimSuffix "-") (sha256sum $name | trunc 6) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Whether a tier is a role of a DisaggregatedSet, and not a workload of its own: root, component */}}
{{- define "tandem.isRole" -}}
{{- if and .root.Values.disaggregatedSet.enabled (not (has .component (list "router" "node"))) }}true{{ end -}}
{{- end -}}

{{/* root, tiers, found */}}
{{- define "tandem.mistakes.set" -}}
{{- $found := .found -}}
{{- if .root.Values.disaggregatedSet.enabled -}}
{{- if not (hasKey .tiers "prefill") -}}
{{- include "tandem.mistake" (dict "found" $found "text" "disaggregatedSet.enabled needs both tiers, as a set has at least two roles: set prefill.enabled to true, or disaggregatedSet.enabled to false") -}}
{{- end -}}
{{- range $name, $tier := .tiers -}}
{{- if and (eq $tier.autoscaling.kind "none") (eq (int $tier.replicas) 0) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.replicas is 0, but a DisaggregatedSet has groups of all roles or of none: set it to 1" $name)) -}}
{{- end -}}
{{- end -}}
{{- if .root.Values.scheduling.minMember -}}
{{- include "tandem.mistake" (dict "found" $found "text" "scheduling.minMember places pods of Deployments together, but with disaggregatedSet.enabled each group has a PodGroup of its operator: set it to 0") -}}
{{- end -}}
{{- end -}}
{{- end -}}
