{{/* What a container asks for: devices, and CPUs and memory that follow its ranks. */}}

{{/* A quantity as a number: bytes of memory, or thousandths of CPUs with `scale` 1000. text, scale */}}
{{- define "tandem.quantity" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $text := include "tandem.scalar" .text -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number $text) | float64) .scale | ceil | int64 -}}
{{- end -}}

{{/* Adds bytes of host memory to the requests and limits of memory that are there: resources, more */}}
{{- define "tandem.addMemory" -}}
{{- $resources := .resources -}}
{{- $more := .more -}}
{{- if $more -}}
{{- range $side := list "limits" "requests" -}}
{{- include "tandem.addBytes" (dict "of" (get $resources $side | default dict) "more" $more) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* of (a side of resources, changed in place), more (bytes) */}}
{{- define "tandem.addBytes" -}}
{{- if .of.memory -}}
{{- $bytes := add (include "tandem.quantity" (dict "text" .of.memory "scale" 1.0) | int64) .more -}}
{{- $_ := set .of "memory" (printf "%dMi" (div (add $bytes 1048575) 1048576)) -}}
{{- end -}}
{{- end -}}

{{/* Ranks that one pod has: the tier */}}
{{- define "tandem.podRanks" -}}
{{- div (include "tandem.ranks" . | int) (int .parallelism.hosts) -}}
{{- end -}}

{{/* Adds what the ranks of a pod behind its first ask for, to what is asked for at all: resources
  (changed in place), of (the tier) */}}
{{- define "tandem.addRanks" -}}
{{- $resources := .resources -}}
{{- $further := sub (include "tandem.podRanks" .of | int) 1 -}}
{{- if gt $further 0 -}}
{{- range $side, $each := .of.resourcesPerRank | default dict -}}
{{- $of := get $resources $side | default dict -}}
{{- if and $of.cpu $each.cpu -}}
{{- $milli := add (include "tandem.quantity" (dict "text" $of.cpu "scale" 1000.0) | int64) (mul $further (include "tandem.quantity" (dict "text" $each.cpu "scale" 1000.0) | int64)) -}}
{{- $_ := set $of "cpu" (ternary (printf "%d" (div $milli 1000)) (printf "%dm" $milli) (eq (mod $milli 1000) 0)) -}}
{{- end -}}
{{- if and $of.memory $each.memory -}}
{{- include "tandem.addBytes" (dict "of" $of "more" (mul $further (include "tandem.quantity" (dict "text" $each.memory "scale" 1.0) | int64))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Resources of the container that holds ranks: the user's, with what follows from its ranks laid into
  them, one GPU for each by a device plugin or by a claim, and what the network needs. root, of,
  component */}}
{{- define "tandem.tierResources" -}}
{{- $resources := .of.resources | default dict | deepCopy -}}
{{- include "tandem.addRanks" (dict "resources" $resources "of" .of) -}}
{{- $devices := deepCopy .of.network.rdma -}}
{{- if and .of.gpu.enabled (eq .of.gpu.source "plugin") -}}
{{- $_ := set $devices .of.gpu.resourceName (include "tandem.podRanks" .of | int) -}}
{{- end -}}
{{- if $devices -}}
{{- range $side := list "limits" "requests" -}}
{{- $_ := set $resources $side (merge (get $resources $side | default dict) $devices) -}}
{{- end -}}
{{- end -}}
{{- with include "tandem.downloadSize" .root -}}
{{- $requests := $resources.requests | default dict -}}
{{- if not (hasKey $requests "ephemeral-storage") -}}
{{- $_ := set $requests "ephemeral-storage" . -}}
{{- $_ := set $resources "requests" $requests -}}
{{- end -}}
{{- end -}}
{{- if .of.kvTiers -}}
{{- $more := add (mul (include "tandem.kvHostGiB" . | int) 1073741824) (include "tandem.adapterBytes" . | int64) -}}
{{- include "tandem.addMemory" (dict "resources" $resources "more" $more) -}}
{{- end -}}
{{- $claims := list -}}
{{- if include "tandem.claimsGpus" . -}}{{- $claims = append $claims (dict "name" "gpus") -}}{{- end -}}
{{- range .of.resourceClaims -}}{{- $claims = append $claims (dict "name" .name) -}}{{- end -}}
{{- if $claims -}}{{- $_ := set $resources "claims" $claims -}}{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Requests above limits, which the API refuses pod by pod: found, name, resources (as the pod has them) */}}
{{- define "tandem.mistakes.resources" -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $kind, $asked := .resources.requests | default dict -}}
{{- if and (hasKey $limits $kind) (has $kind (list "cpu" "memory" "ephemeral-storage")) -}}
{{- $limit := get $limits $kind -}}
{{- if gt (include "tandem.quantity" (dict "text" $asked "scale" 1000.0) | int64) (include "tandem.quantity" (dict "text" $limit "scale" 1000.0) | int64) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.resources ask for %v of %s, more than their limit of %v: raise %s.resources.limits.%s" $name $asked $kind $limit $name $kind)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
