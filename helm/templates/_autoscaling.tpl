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
{{- printf "{namespace=%q,release=%q,component=%q}" .root.Release.Namespace .root.Release.Name .component -}}
{{- end -}}

{{/* Summed over the pods, never averaged: divided by the target it is the number of pods needed.
  root, component, of */}}
{{- define "tandem.scalingQuery" -}}
{{- $series := include "tandem.series" . -}}
{{- if eq .of.autoscaling.metric "backlog" -}}
{{- printf "sum(tandem_waiting_tokens%s) / %s or vector(0)" $series (include "tandem.scalar" .of.autoscaling.tokensPerSecond) -}}
{{- else -}}
{{- printf "sum(vllm:kv_cache_usage_perc%s) or vector(0)" $series -}}
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
