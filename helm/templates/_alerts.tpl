{{/* Alerts, each with a runbook in docs/monitoring.md: tiers, those that all models have in common,
  rule, and the series' labels of router, prefill, decode and all. A window is longer than what an alert waits for, else a burst has
  left it before the alert fires. */}}
{{- define "tandem.alerts" -}}
- alert: TandemRouterMissing
  expr: absent(tandem_router_open_requests{ {{- .router -}} })
  for: 5m
  severity: critical
  summary: no router is scraped
- alert: TandemNoReadyNodes
  expr: max by (tier) (tandem_router_nodes{ {{- .router -}} ,state="ready"{{ if not .common.prefill }},tier="decode"{{ end }}}) == 0
  for: 2m
  severity: critical
  summary: {{ `'routers see no ready {{ $labels.tier }} node'` }}
- alert: TandemTierNotScraped
  expr: {{ include "tandem.notScraped" . }}
  for: 10m
  severity: warning
  summary: {{ `'routers see ready {{ $labels.tier }} nodes, of which none is scraped: no other alert sees that tier'` }}
- alert: TandemErrors
  expr: sum(rate(tandem_router_requests_total{ {{- .router -}} ,status=~"5.."}[10m])) / sum(rate(tandem_router_requests_total{ {{- .router -}} }[10m])) > 0.05 and {{ include "tandem.failures" (dict "router" .router "window" "10m" "rule" .rule) }}
  for: 5m
  severity: warning
  summary: {{ `'{{ $value | humanizePercentage }} of requests fail'` }}
- alert: TandemManyErrors
  expr: sum(rate(tandem_router_requests_total{ {{- .router -}} ,status=~"5.."}[5m])) / sum(rate(tandem_router_requests_total{ {{- .router -}} }[5m])) > 0.2 and {{ include "tandem.failures" (dict "router" .router "window" "5m" "rule" .rule) }}
  for: 2m
  severity: critical
  summary: {{ `'{{ $value | humanizePercentage }} of requests fail'` }}
- alert: TandemSlowFirstToken
  expr: histogram_quantile({{ .rule.objective }}, sum by (le) (rate(tandem_router_time_to_first_byte_seconds_bucket{ {{- .router -}} }[10m]))) > {{ .rule.ttftSeconds }}
  for: 10m
  severity: warning
  summary: {{ `'first tokens take {{ $value | humanizeDuration }}'` }}
- alert: TandemSlowTokens
  expr: histogram_quantile({{ .rule.objective }}, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket{ {{- .decode -}} }[10m]))) > {{ .rule.itlSeconds }}
  for: 10m
  severity: warning
  summary: {{ `'tokens follow each other after {{ $value | humanizeDuration }}'` }}
- alert: TandemBrokenStreams
  expr: sum(increase(tandem_router_broken_streams_total{ {{- .router -}} }[15m])) > 0
  for: 1m
  severity: warning
  summary: {{ `'{{ $value }} answers broke off after their first byte'` }}
- alert: TandemEngineDown
  expr: tandem_engine_up{ {{- .all -}} } == 0
  for: 1m
  severity: critical
  summary: {{ `'the engine of {{ $labels.pod }} is dead'` }}
- alert: TandemKernelCompiled
  expr: sum by (pod) (increase(tandem_kernel_compiles_total{ {{- .all -}} }[30m])) > 0
  for: 1m
  severity: warning
  summary: {{ `'{{ $labels.pod }} compiled kernels while requests waited; its log names them'` }}
- alert: TandemStaleNode
  expr: max by (tier, node) (tandem_router_node_report_age_seconds{ {{- .router -}} }) > 30
  for: 2m
  severity: warning
  summary: {{ `'{{ $labels.tier }} node {{ $labels.node }} no longer reports'` }}
- alert: TandemEjections
  expr: sum by (tier) (increase(tandem_router_ejections_total{ {{- .router -}} }[15m])) > 3
  for: 1m
  severity: warning
  summary: {{ `'{{ $labels.tier }} nodes fail requests and are left out'` }}
- alert: TandemDiscoveryFailing
  expr: sum(increase(tandem_router_discovery_failures_total{ {{- .router -}} }[15m])) > 10
  for: 5m
  severity: warning
  summary: routers cannot find out which nodes there are
{{- if include "tandem.modelRules" .root }}
- alert: TandemModelWithoutNodes
  expr: max by (model) (tandem_router_model_ready_nodes{ {{- .router -}} }) == 0
  for: 2m
  severity: critical
  summary: {{ `'routers see no ready decode node of {{ $labels.model }}'` }}
- alert: TandemModelRulesBroken
  expr: max(tandem_router_model_rules_broken{ {{- .router -}} }) > 0
  for: 5m
  severity: warning
  summary: routers cannot use the changed rules of models, and go on with the old ones
{{- end }}
{{- if include "tandem.hasAdapters" .root }}
- alert: TandemAdaptersBehind
  expr: max by (tier) (tandem_router_adapters_behind{ {{- .router -}} }) > 0
  for: 10m
  severity: warning
  summary: {{ `'{{ $labels.tier }} nodes lack {{ $value }} adapters that were loaded by calls, or have not unloaded them; the log of the router says why'` }}
{{- end }}
- alert: TandemKvCacheFull
  expr: avg(vllm:kv_cache_usage_perc{ {{- .decode -}} }) > 0.9
  for: 15m
  severity: warning
  summary: {{ `'decode KV caches are {{ $value | humanizePercentage }} full'` }}
- alert: TandemPreemptions
  expr: sum(rate(vllm:num_preemptions_total{ {{- .decode -}} }[10m])) > 0.1
  for: 10m
  severity: warning
  summary: decode nodes put running requests back to make room
{{ include "tandem.burnRateAlerts" . }}
{{- if include "tandem.hasTls" .root }}
- alert: TandemCertificateEnds
  expr: min by (component, pod) (tandem_tls_certificate_expiry_timestamp_seconds{ {{- .all -}} }) - time() < {{ include "tandem.lateRenewalSeconds" .root }}
  for: 10m
  severity: warning
  summary: {{ `'the certificate of {{ $labels.pod }} ends in {{ $value | humanizeDuration }}'` }}
{{- end }}
{{- if .tiers.prefill }}
- alert: TandemPrefillBacklog
  expr: {{ .backlog }} > {{ .rule.backlogSeconds }}
  for: 5m
  severity: warning
  summary: {{ `'prompts wait {{ $value | humanizeDuration }} for prefill'` }}
- alert: TandemPrefillAttemptsFail
  expr: sum(increase(tandem_prefill_attempt_failures_total{ {{- .decode -}} }[15m])) / sum(increase(tandem_prefill_attempts_total{ {{- .decode -}} }[15m])) > 0.05
  for: 5m
  severity: warning
  summary: {{ `'{{ $value | humanizePercentage }} of remote prefills fail'` }}
- alert: TandemLocalPrefill
  expr: sum(increase(tandem_local_prefill_fallbacks_total{ {{- .decode -}} }[15m])) / sum(increase(tandem_disagg_decision_total{ {{- .decode -}} }[15m])) > 0.05
  for: 5m
  severity: warning
  summary: {{ `'decode nodes compute {{ $value | humanizePercentage }} of prompts after prefill failed'` }}
- alert: TandemKvLeasesExpire
  expr: sum(increase(tandem_kv_transfer_leases_expired_total{ {{- .prefill -}} }[15m])) > 3
  for: 5m
  severity: warning
  summary: KV is dropped on prefill nodes because nobody fetches it
- alert: TandemKvCorrupt
  expr: sum by (pod) (increase(tandem_kv_transfer_corrupt_chunks_total{ {{- .all -}} }[1h])) > 0
  for: 1m
  severity: warning
  summary: {{ `'KV arrives damaged at {{ $labels.pod }}'` }}
- alert: TandemTooFewPrefill
  expr: ({{ .backlog }} > {{ .rule.backlogSeconds }}) and on () (avg(vllm:kv_cache_usage_perc{ {{- .decode -}} }) < 0.3)
  for: 30m
  severity: info
  summary: prompts wait while decode has room
- alert: TandemTooFewDecode
  expr: (avg(vllm:kv_cache_usage_perc{ {{- .decode -}} }) > 0.9) and on () ({{ .backlog }} < 0.1)
  for: 30m
  severity: info
  summary: decode is full while prefill is idle
{{- end }}
{{- end -}}

{{/* Whether so many requests failed in a window that a share of them says something. router, rule,
  window */}}
{{- define "tandem.failures" -}}
sum(increase(tandem_router_requests_total{ {{- .router -}} ,status=~"5.."}[{{ .window }}])) > {{ .rule.minFailures }}
{{- end -}}

{{/* Tiers that routers see, and Prometheus does not, over all models; nodes that change their role are
  of both. router, all */}}
{{- define "tandem.notScraped" -}}
{{- $seen := list -}}
{{- range $tier := list "prefill" "decode" -}}
{{- $seen = append $seen (printf "label_replace(count(tandem_engine_up{%s,component=~\"(.+-)?(%s|node)\"}), \"tier\", %q, \"\", \"\")" $.all $tier $tier) -}}
{{- end -}}
max by (tier) (tandem_router_nodes{ {{- .router -}} ,state="ready"}) > 0 unless on (tier) ({{ join " or " $seen }})
{{- end -}}
