{{/* Slowly down and quickly up: a new pod takes minutes to load, and one that goes takes its
  prefix cache along. */}}
{{- define "tandem.scalingBehavior" -}}
{{- $exact := eq .metric "slo" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  {{- if $exact }}
  # Routers tell how many pods are needed, not that there are too few.
  policies: [{type: Pods, value: 4, periodSeconds: 15}, {type: Percent, value: 100, periodSeconds: 15}]
  {{- else }}
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
  {{- end }}
scaleDown:
  stabilizationWindowSeconds: {{ int .scaleDownWindowSeconds }}
  policies: [{type: {{ ternary "Percent" "Pods" $exact }}, value: {{ ternary 50 1 $exact }}, periodSeconds: {{ ternary 60 300 $exact }}}]
{{- end -}}

{{/* Series of one component, by the labels that the PodMonitors give: root, component */}}
{{- define "tandem.series" -}}
{{- printf "{namespace=%q,release=%q,component=%q}" .root.Release.Namespace .root.Release.Name (include "tandem.componentLabel" .) -}}
{{- end -}}

{{/* Summed over the pods, never averaged: divided by the target it is the number of pods needed.
  Without series it is empty, which is an error to KEDA: zero would scale a loaded tier down. So it is
  while a router does not tell its share: the sum of the others is too small.
  root, component, of */}}
{{- define "tandem.scalingQuery" -}}
{{- $series := include "tandem.series" . -}}
{{- if eq .of.autoscaling.metric "slo" -}}
{{- $routers := include "tandem.series" (dict "root" .root "component" "router") -}}
{{- $one := "" -}}
{{- with include "tandem.countedName" .root -}}{{- $one = printf ",model=%q" . -}}{{- end -}}
{{- $shares := printf "tandem_router_desired_replicas%s,tier=%q%s}" (trimSuffix "}" $routers) .component $one -}}
{{- printf "sum(%s) and count(group by (pod) (%s)) == count(tandem_router_open_requests%s)" $shares $shares $routers -}}
{{- else if eq .of.autoscaling.metric "backlog" -}}
{{- printf "sum(tandem_waiting_tokens%s) / %s" $series (include "tandem.scalar" .of.autoscaling.tokensPerSecond) -}}
{{- else -}}
{{- printf "sum(vllm:kv_cache_usage_perc%s)" $series -}}
{{- end -}}
{{- end -}}

{{/* The same for the custom metrics API: a metric of pods, and its target on each. */}}
{{- define "tandem.scalingPodMetric" -}}
{{- $scaling := .of.autoscaling -}}
{{- if eq $scaling.metric "slo" -}}
type: External
external:
  metric:
    name: tandem_router_desired_replicas
    selector: {matchLabels: {release: {{ .root.Release.Name | quote }}, tier: {{ .component | quote }}{{ with include "tandem.countedName" .root }}, model: {{ . | quote }}{{ end }}}}
  target: {type: AverageValue, averageValue: "1"}
{{- else -}}
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
