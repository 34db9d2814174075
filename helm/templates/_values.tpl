{{/* Lays `over` over `base`, in place: maps are joined, everything else is replaced, null takes
  away. (Sprig's mergeOverwrite skips false, 0 and "".) */}}
{{- define "tandem.overlay" -}}
{{- $base := .base -}}
{{- range $key, $value := .over -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $base $key -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $base $key)) -}}
{{- include "tandem.overlay" (dict "base" (get $base $key) "over" $value) -}}
{{- else -}}
{{- $_ := set $base $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Puts the tiers that there are, and nodes that change between them, with their defaults, into
  `into`: root, into */}}
{{- define "tandem.tiers" -}}
{{- $root := .root -}}
{{- $into := .into -}}
{{- $names := ternary (list "prefill" "decode") (list "decode") $root.Values.prefill.enabled -}}
{{- if int $root.Values.node.replicas -}}{{- $names = append $names "node" -}}{{- end -}}
{{- range $name := $names -}}
{{- $tier := deepCopy $root.Values.tierDefaults -}}
{{- include "tandem.overlay" (dict "base" $tier "over" (get $root.Values $name)) -}}
{{- $_ := set $into $name $tier -}}
{{- end -}}
{{- include "tandem.followRatio" $into -}}
{{- end -}}

{{/* Ranks of one node of a tier, one GPU each: the tier */}}
{{- define "tandem.ranks" -}}
{{- mul (int .parallelism.tensor) (int .parallelism.pipeline) (int .parallelism.data) -}}
{{- end -}}

{{/* A number as people write it: Helm reads 1048576 as a float and would print 1.048576e+06. */}}
{{- define "tandem.scalar" -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{- $text = printf "%d" (int64 .) -}}{{- end -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* Settings as flags, one a line: maxNumSeqs: 8 is --max-num-seqs=8, true is --name, false is
  --no-name, a list is joined by commas, a map is JSON; null and an empty list say nothing. */}}
{{- define "tandem.flags" -}}
{{- range $name, $value := . }}
{{- $flag := kebabcase $name }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else if kindIs "slice" $value }}
{{- $parts := list }}
{{- range $value }}{{- $parts = append $parts (include "tandem.scalar" .) }}{{- end }}
{{- with $parts }}
- {{ printf "--%s=%s" $flag (join "," .) | quote }}
{{- end }}
{{- else if kindIs "map" $value }}
- {{ printf "--%s=%s" $flag (toJson $value) | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $flag (include "tandem.scalar" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The longest that a pod may take to serve: root, of */}}
{{- define "tandem.startSeconds" -}}
{{- add (int .of.probes.startup.budgetSeconds) 600 (include "tandem.preloadSeconds" .) -}}
{{- end -}}

{{/* The longest that it waits for the model: root */}}
{{- define "tandem.preloadSeconds" -}}
{{- $preload := .root.Values.model.preload -}}
{{- ternary $preload.timeoutSeconds 0 (eq $preload.kind "job") | int -}}
{{- end -}}

{{/* The sum that must fit before the kubelet kills: time not to be killed in. */}}
{{- define "tandem.graceSeconds" -}}
{{- add (int .preStopSeconds) (int .drainSeconds) (int .teardownSeconds) -}}
{{- end -}}
