{{/* Slowly down and quickly up: a new pod takes minutes to load, and one that goes takes its
  prefix cache along. */}}
{{- define "tandem.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
scaleDown:
  stabilizationWindowSeconds: {{ int .scaleDownWindowSeconds }}
  policies: [{type: Pods, value: 1, periodSeconds: 300}]
{{- end -}}

{{/* Series of one component, by the labels that the PodMonitors give: root, component */}}
{{- define "tandem.series" -}}
{{- printf "{namespace=%q,release=%q,component=%q}" .root.Release.Namespace .root.Release.Name (include "tandem.componentLabel" .) -}}
{{- end -}}

{{/* Summed over the pods, never averaged: divided by the target it is the number of pods needed.
  Without series it is empty, which is an error to KEDA: zero would scale a loaded tier down.
  root, component, of */}}
{{- define "tandem.scalingQuery" -}}
{{- $series := include "tandem.series" . -}}
{{- if eq .of.autoscaling.metric "backlog" -}}
{{- printf "sum(tandem_waiting_tokens%s) / %s" $series (include "tandem.scalar" .of.autoscaling.tokensPerSecond) -}}
{{- else -}}
{{- printf "sum(vllm:kv_cache_usage_perc%s)" $series -}}
{{- end -}}
{{- end -}}

{{/* The same for the custom metrics API: a metric of pods, and its target on each. */}}
{{- define "tandem.scalingPodMetric" -}}
{{- $scaling := .of.autoscaling -}}
type: Pods
pods:
  {{- if eq $scaling.metric "backlog" }}
  metric: {name: tandem_waiting_tokens}
  target: {type: AverageValue, averageValue: {{ mulf $scaling.target $scaling.tokensPerSecond | ceil | int64 | quote }}}
  {{- else }}
  metric: {name: "vllm:kv_cache_usage_perc"}
  target: {type: AverageValue, averageValue: {{ printf "%dm" (mulf $scaling.target 1000 | ceil | int64) | quote }}}
  {{- end }}
{{- end -}}

{{/* The number of pods or groups: the live one where an autoscaler has the word, or has had it until
  now. Without a number Kubernetes takes one, so a field that goes shrinks the tier to one pod, and
  a field that comes back to what the values say. root, component, of */}}
{{- define "tandem.replicas" -}}
{{- $namespace := .root.Release.Namespace -}}
{{- $target := include "tandem.scaleTarget" . | fromYaml -}}
{{- $scaled := ne .of.autoscaling.kind "none" -}}
{{- if not $scaled -}}
{{- range $name := list $target.name (printf "keda-hpa-%s" $target.name) -}}
{{- if lookup "autoscaling/v2" "HorizontalPodAutoscaler" $namespace $name -}}
{{- $scaled = true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $live := dict -}}
{{- if $scaled -}}
{{- $live = lookup $target.apiVersion $target.kind $namespace $target.name -}}
{{- end -}}
{{- if $live -}}
{{ int $live.spec.replicas }}
{{- else if eq .of.autoscaling.kind "none" -}}
{{ int .of.replicas }}
{{- else -}}
{{ max (int .of.replicas) (int .of.autoscaling.minReplicas) }}
{{- end -}}
{{- end -}}
