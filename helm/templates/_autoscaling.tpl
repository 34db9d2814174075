{{/* Slowly down and quickly up: a new pod takes minutes to load, and one that goes takes its
  prefix cache along. */}}
{{- define "tandem.scalingBehavior" -}}
{{- $exact := has .metric (list "slo" "ratio") -}}
scaleUp:
  stabilizationWindowSeconds: 0
  {{- if $exact }}
  # The metric says how many pods are needed, not that there are too few.
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

{{/* What a tier scales by, {metric, target} each: the one that asks for the most pods decides. The tier */}}
{{- define "tandem.scalingMetrics" -}}
{{- $scaling := .autoscaling -}}
{{- concat (list (dict "metric" $scaling.metric "target" $scaling.target)) $scaling.moreMetrics | toYaml -}}
{{- end -}}

{{/* Their names, separated by commas. The tier */}}
{{- define "tandem.metricNames" -}}
{{- $names := list -}}
{{- range include "tandem.scalingMetrics" . | fromYamlArray -}}{{- $names = append $names .metric -}}{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{/* Parts of prefill.ratio, P:D, as `prefill` and `decode`. The tier */}}
{{- define "tandem.ratio" -}}
{{- $parts := splitList ":" (default "1:1" .ratio) -}}
{{ dict "prefill" (first $parts | int) "decode" (last $parts | int) | toYaml }}
{{- end -}}

{{/* Makes prefill as large as its ratio to decode says: the tiers, changed in place. */}}
{{- define "tandem.followRatio" -}}
{{- with .prefill -}}{{- if .ratio -}}
{{- $ratio := include "tandem.ratio" . | fromYaml -}}
{{- $pods := mul (int $.decode.replicas) (int $ratio.prefill) -}}
{{- $_ := set . "replicas" (div (add $pods (int $ratio.decode) -1) (int $ratio.decode)) -}}
{{- end -}}{{- end -}}
{{- end -}}

{{/* Summed over the pods, never averaged: divided by the target it is the number of pods needed.
  Without series it is empty, which is an error to KEDA: zero would scale a loaded tier down. So it is
  while a router does not tell its share: the sum of the others is too small.
  root, component, of, metric */}}
{{- define "tandem.scalingQuery" -}}
{{- $series := include "tandem.series" . -}}
{{- if eq .metric "slo" -}}
{{- $routers := include "tandem.series" (dict "root" .root "component" "router") -}}
{{- $one := "" -}}
{{- with include "tandem.countedName" .root -}}{{- $one = printf ",model=%q" . -}}{{- end -}}
{{- $shares := printf "tandem_router_desired_replicas%s,tier=%q%s}" (trimSuffix "}" $routers) .component $one -}}
{{- printf "sum(%s) and count(group by (pod) (%s)) == count(tandem_router_open_requests%s)" $shares $shares $routers -}}
{{- else if eq .metric "ratio" -}}
{{- $ratio := include "tandem.ratio" .of | fromYaml -}}
{{- $decode := include "tandem.series" (dict "root" .root "component" "decode") -}}
{{- printf "count(tandem_engine_up%s == 1) * %d / %d" $decode (int $ratio.prefill) (int $ratio.decode) -}}
{{- else if eq .metric "backlog" -}}
{{- printf "sum(tandem_waiting_tokens%s) / %s" $series (include "tandem.scalar" .of.autoscaling.tokensPerSecond) -}}
{{- else if eq .metric "running" -}}
{{- printf "sum(vllm:num_requests_running%s)" $series -}}
{{- else -}}
{{- printf "sum(vllm:kv_cache_usage_perc%s)" $series -}}
{{- end -}}
{{- end -}}

{{/* The same for the APIs of custom and external metrics: a metric of pods, and its target on each.
  root, component, of, metric, target */}}
{{- define "tandem.scalingPodMetric" -}}
{{- if eq .metric "ratio" -}}
{{- $ratio := include "tandem.ratio" .of | fromYaml -}}
type: External
external:
  metric:
    name: tandem_engine_up
    selector: {matchLabels: {release: {{ .root.Release.Name | quote }}, component: {{ include "tandem.componentLabel" (dict "root" .root "component" "decode") | quote }}}}
  target: {type: AverageValue, averageValue: {{ printf "%dm" (divf (mul 1000 (int $ratio.decode)) (int $ratio.prefill) | ceil | int64) | quote }}}
{{- else if eq .metric "slo" -}}
type: External
external:
  metric:
    name: tandem_router_desired_replicas
    selector: {matchLabels: {release: {{ .root.Release.Name | quote }}, tier: {{ .component | quote }}{{ with include "tandem.countedName" .root }}, model: {{ . | quote }}{{ end }}}}
  target: {type: AverageValue, averageValue: "1"}
{{- else -}}
type: Pods
pods:
  {{- if eq .metric "backlog" }}
  metric: {name: tandem_waiting_tokens}
  target: {type: AverageValue, averageValue: {{ mulf .target .of.autoscaling.tokensPerSecond | ceil | int64 | quote }}}
  {{- else }}
  metric: {name: {{ ternary "vllm:num_requests_running" "vllm:kv_cache_usage_perc" (eq .metric "running") | quote }}}
  target: {type: AverageValue, averageValue: {{ printf "%dm" (mulf .target 1000 | ceil | int64) | quote }}}
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

{{/* root (of a model), tiers, found */}}
{{- define "tandem.mistakes.ratio" -}}
{{- $found := .found -}}
{{- $prefill := .root.Values.prefill -}}
{{- $ratio := $prefill.ratio -}}
{{- range $name, $tier := .tiers -}}
{{- $follows := and (ne $tier.autoscaling.kind "none") (has "ratio" (include "tandem.metricNames" $tier | splitList ",")) -}}
{{- if and $follows (ne $name "prefill") -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling has the metric ratio, by which prefill follows decode: choose another" $name)) -}}
{{- else if and $follows (not $ratio) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "prefill.autoscaling has the metric ratio: set prefill.ratio, such as \"1:2\"") -}}
{{- else if and $ratio (eq $name "prefill") (ne $tier.autoscaling.kind "none") (not $follows) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "prefill.ratio is set, but prefill's autoscaler goes by other metrics: set prefill.autoscaling.metric to ratio, or leave prefill.ratio empty") -}}
{{- else if and $ratio (eq $name "decode") (ne $tier.autoscaling.kind "none") $prefill.enabled -}}{{- if eq $.tiers.prefill.autoscaling.kind "none" -}}
{{- include "tandem.mistake" (dict "found" $found "text" "prefill.ratio would follow decode.replicas, but an autoscaler changes how many decode pods there are: set prefill.autoscaling.kind, too, and its metric to ratio") -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- if and $ratio (hasKey $prefill "replicas") -}}
{{- include "tandem.mistake" (dict "found" $found "text" "prefill.ratio and prefill.replicas both say how many prefill pods there are: leave one out (an entry of models with replicas of its own sets ratio to \"\")") -}}
{{- end -}}
{{- if and $ratio (not $prefill.enabled) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "prefill.ratio is set, but prefill.enabled is false: set it to true") -}}
{{- end -}}
{{- end -}}
