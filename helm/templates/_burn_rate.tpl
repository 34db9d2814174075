{{/* Alerts on the error budget: a share of 1 - objective of all requests (or tokens) may be slower
  than the objective's time, and one of 1 - availability may fail. A burn rate of 1 spends the budget of 30 days in 30 days. Each alert asks
  a long window, to be sure, and a short one, to end soon after the trouble.

    14.4 for 1 h and 5 min, or 6 for 6 h and 30 min    2 or 5 % of the budget are gone: wake somebody
    3 for 1 d and 2 h, or 1 for 3 d and 6 h            10 % are gone: look at it this week

  rule, router, decode */}}
{{- define "tandem.burnRateAlerts" -}}
{{- $ttft := dict "metric" "tandem_router_time_to_first_byte_seconds" "labels" .router "le" (include "tandem.bucket" (dict "seconds" .rule.ttftSeconds "buckets" (include "tandem.ttftBuckets" .))) -}}
{{- $itl := dict "metric" "vllm:inter_token_latency_seconds" "labels" .decode "le" (include "tandem.bucket" (dict "seconds" .rule.itlSeconds "buckets" (include "tandem.itlBuckets" .))) -}}
{{- $served := dict "metric" "tandem_router_requests" "labels" .router -}}
{{- $rule := .rule -}}
{{- $lasting := dict "objective" .rule.availability "minFailures" .rule.minFailures -}}
{{- $fast := list (list 14.4 "1h" "5m") (list 6.0 "6h" "30m") -}}
{{- $slow := list (list 3.0 "1d" "2h") (list 1.0 "3d" "6h") -}}
- alert: TandemFirstTokenBudgetFast
  expr: {{ include "tandem.burns" (dict "of" $ttft "rule" $rule "windows" $fast) }}
  for: 2m
  severity: critical
  summary: {{ printf "first tokens after more than %s s spend the error budget fast" $ttft.le | quote }}
- alert: TandemFirstTokenBudgetSlow
  expr: {{ include "tandem.burns" (dict "of" $ttft "rule" $rule "windows" $slow) }}
  for: 15m
  severity: warning
  summary: {{ printf "first tokens after more than %s s spend the error budget" $ttft.le | quote }}
- alert: TandemTokenTimeBudgetFast
  expr: {{ include "tandem.burns" (dict "of" $itl "rule" $rule "windows" $fast) }}
  for: 2m
  severity: critical
  summary: {{ printf "more than %s s between tokens spend the error budget fast" $itl.le | quote }}
- alert: TandemTokenTimeBudgetSlow
  expr: {{ include "tandem.burns" (dict "of" $itl "rule" $rule "windows" $slow) }}
  for: 15m
  severity: warning
  summary: {{ printf "more than %s s between tokens spend the error budget" $itl.le | quote }}
- alert: TandemAvailabilityBudgetFast
  expr: {{ include "tandem.burns" (dict "of" $served "rule" $lasting "windows" $fast) }}
  for: 2m
  severity: critical
  summary: failed requests spend the error budget fast
- alert: TandemAvailabilityBudgetSlow
  expr: {{ include "tandem.burns" (dict "of" $served "rule" $lasting "windows" $slow) }}
  for: 15m
  severity: warning
  summary: failed requests spend the error budget
{{- end -}}

{{/* Whether the budget burns so fast, over both windows of a pair. of, rule, windows */}}
{{- define "tandem.burns" -}}
{{- $of := .of -}}
{{- $rule := .rule -}}
{{- $pairs := list -}}
{{- range .windows -}}
{{- $limit := include "tandem.burnLimit" (dict "factor" (index . 0) "objective" $rule.objective) -}}
{{- $long := include "tandem.badShare" (dict "of" $of "window" (index . 1)) -}}
{{- $short := include "tandem.badShare" (dict "of" $of "window" (index . 2)) -}}
{{- $many := printf "%s > %v" (include "tandem.badCount" (dict "of" $of "window" (index . 1))) $rule.minFailures -}}
{{- $pairs = append $pairs (printf "(%s > %s and %s > %s and %s)" $long $limit $short $limit $many) -}}
{{- end -}}
{{- join " or " $pairs -}}
{{- end -}}

{{/* The part of what came in a window that failed, or was slower than the bucket's bound. */}}
{{- define "tandem.badShare" -}}
{{- if .of.le -}}
1 - sum(rate({{ .of.metric }}_bucket{ {{- .of.labels }},le={{ .of.le | quote }}}[{{ .window }}])) / sum(rate({{ .of.metric }}_count{ {{- .of.labels -}} }[{{ .window }}]))
{{- else -}}
sum(rate({{ .of.metric }}_total{ {{- .of.labels }},status=~"5.."}[{{ .window }}])) / sum(rate({{ .of.metric }}_total{ {{- .of.labels -}} }[{{ .window }}]))
{{- end -}}
{{- end -}}

{{/* How many those were: a share of one or two requests says nothing. */}}
{{- define "tandem.badCount" -}}
{{- if .of.le -}}
sum(increase({{ .of.metric }}_count{ {{- .of.labels -}} }[{{ .window }}])) - sum(increase({{ .of.metric }}_bucket{ {{- .of.labels }},le={{ .of.le | quote }}}[{{ .window }}]))
{{- else -}}
sum(increase({{ .of.metric }}_total{ {{- .of.labels }},status=~"5.."}[{{ .window }}]))
{{- end -}}
{{- end -}}

{{/* factor times the budget; a lax objective never needs more than nine of ten to be slow. */}}
{{- define "tandem.burnLimit" -}}
{{- $limit := mulf (float64 .factor) (subf 1.0 (float64 .objective)) -}}
{{- if gt $limit 0.9 }}0.9{{ else }}{{ printf "%.6g" $limit }}{{ end -}}
{{- end -}}

{{/* The first bound of a histogram that is no less than `seconds`: a share can be read nowhere else. */}}
{{- define "tandem.bucket" -}}
{{- $found := "" -}}
{{- range splitList " " .buckets -}}
{{- if and (eq $found "") (ge (float64 .) (float64 $.seconds)) -}}{{- $found = . -}}{{- end -}}
{{- end -}}
{{- default "+Inf" $found -}}
{{- end -}}

{{/* Bounds as the services write them: router/observe/first_byte_times.py, engine/node/metrics/engine_metrics.py. */}}
{{- define "tandem.ttftBuckets" -}}
0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0
{{- end -}}
{{- define "tandem.itlBuckets" -}}
0.001 0.002 0.003 0.004 0.005 0.006 0.008 0.01 0.0125 0.015 0.02 0.025 0.03 0.04 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0
{{- end -}}
