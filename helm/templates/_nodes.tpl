{{/* Nodes that change between prefill and decode (`tandem node`): a third kind of pods beside the tiers.
  Selectors and names call them node, whatever they are just now; routers follow their reports. */}}

{{/* Rules of a tier's policy for them, or of their own for each other: root (of a model), tiers,
  component, side (from: they call its pods; to: its pods call them) */}}
{{- define "tandem.nodeRules" -}}
{{- if hasKey .tiers "node" }}
{{- $own := get .tiers .component }}
{{- $calls := or (ne .component "prefill") (include "tandem.sharesPrefixes" (dict "of" $own)) }}
{{- $isCalled := include "tandem.givesKv" (dict "component" .component "of" $own) }}
{{- if ternary $isCalled $calls (eq .side "from") }}
# Nodes that are prefill or decode.
- ports: {{- include "tandem.prefillPorts" (ternary $own .tiers.node (eq .side "from")) | nindent 4 }}
  {{- $peer := dict "podSelector" (dict "matchLabels" (fromYaml (include "tandem.selectorLabels" (dict "root" .root "component" "node")))) }}
  {{- include "tandem.policyPeer" (dict "side" .side "peer" $peer "of" .tiers.node) | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Queries about a tier, which then count pods of `node` as what they are just now: text, quote (as the
  text writes it), labels (of the release) */}}
{{- define "tandem.withRoles" -}}
{{- $quote := replace `\` `\\` .quote -}}
{{- $head := printf `([A-Za-z0-9_:]+\{[^{}]*)component=%s([^"\\]*)(prefill|decode)%s` $quote $quote -}}
{{- $series := printf `${1}component=~%[1]s${2}(${3}|node)%[1]s${4}` .quote -}}
{{- $role := printf `on (namespace, pod) tandem_node_role{%[2]s,role=%[1]s${3}%[1]s}` .quote (replace `$` `$$` .labels) -}}
{{- $rates := regexReplaceAll (printf `rate\(%s([^{}]*\}\[[^\]]*\])\)` $head) .text (printf `(rate(%s) and %s)` $series $role) -}}
{{- $rates = regexReplaceAll (printf `increase\(%s([^{}]*\}\[[^\]]*\])\)` $head) $rates (printf `(increase(%s) and %s)` $series $role) -}}
{{- regexReplaceAll (printf `\(%s([^{}]*\})\)` $head) $rates (printf `(%s and %s)` $series $role) -}}
{{- end -}}

{{/* root (of a model), name, tier, found */}}
{{- define "tandem.mistakes.node" -}}
{{- if eq .name "node" -}}
{{- $found := .found -}}
{{- $parallelism := .tier.parallelism -}}
{{- range $kind := list "pipeline" "data" "hosts" -}}
{{- if gt (int (get $parallelism $kind)) 1 -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "node.parallelism.%s is %d, but nodes that change their role have one: set it to 1, or node.replicas to 0" $kind (int (get $parallelism $kind)))) -}}
{{- end -}}
{{- end -}}
{{- if ne .tier.autoscaling.kind "none" -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "node.autoscaling.kind is %s, but pods of node are of two kinds, and which of them it would end is chance: set it to none, and scale the tiers" .tier.autoscaling.kind)) -}}
{{- end -}}
{{- if .tier.settings.speculativeConfig -}}
{{- include "tandem.mistake" (dict "found" $found "text" "node.settings.speculativeConfig is set, which nodes that change their role refuse: set it to null for node, or node.replicas to 0") -}}
{{- end -}}
{{- if .root.Values.inferencePool.enabled -}}
{{- include "tandem.mistake" (dict "found" $found "text" "inferencePool.enabled tells nodes apart by a label of their pods, which does not follow a role: set node.replicas to 0") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Routers count all nodes of a kind that it takes, and a scaler those of its tier: root, name, tier,
  found */}}
{{- define "tandem.mistakes.sloBesideNodes" -}}
{{- if and (int .root.Values.node.replicas) (has "slo" (include "tandem.metricNames" .tier | splitList ",")) (ne .name "node") -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "%s.autoscaling.metric is slo, whose number has the pods of node in it: choose %s, or set node.replicas to 0" .name (ternary "backlog" "kvUtilization" (eq .name "prefill")))) -}}
{{- end -}}
{{- end -}}
