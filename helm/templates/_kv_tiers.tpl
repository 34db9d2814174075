{{/* KV behind the cache of the GPUs: host memory, which outlives the container as long as its pod does,
  and a local disk. Sizes are of a rank, in GiB. */}}

{{/* How many GiB of host memory the ranks of one pod have for KV: of */}}
{{- define "tandem.kvHostGiB" -}}
{{- mul (int .of.kvTiers.hostGiB) (include "tandem.podRanks" .of | int) -}}
{{- end -}}

{{- define "tandem.kvDiskGiB" -}}
{{- mul (int .of.kvTiers.diskGiB) (include "tandem.podRanks" .of | int) -}}
{{- end -}}

{{- define "tandem.kvTierFlags" -}}
{{- with .of.kvTiers }}
{{- if .hostGiB }}
- --kv-host-memory-bytes={{ mul (int .hostGiB) 1073741824 }}
- --kv-host-memory-path=/var/lib/tandem/kv/memory
{{- end }}
{{- if .diskGiB }}
- --kv-disk-bytes={{ mul (int .diskGiB) 1073741824 }}
- --kv-disk-path=/var/lib/tandem/kv/disk
{{- end }}
{{- end }}
{{- if include "tandem.hasKvStore" . }}
- {{ printf "--kv-store=%s" (include "tandem.kvStoreUrl" .root) | quote }}
{{- end }}
{{- end -}}

{{/* Whether a tier's nodes use the store: root, of */}}
{{- define "tandem.hasKvStore" -}}
{{- if and (ne .root.Values.kvStore.kind "none") .of.kvTiers.hostGiB -}}true{{- end -}}
{{- end -}}

{{- define "tandem.kvStoreUrl" -}}
{{- if eq .Values.kvStore.kind "url" -}}
{{- .Values.kvStore.url -}}
{{- else -}}
{{- printf "mooncake://%s:50051" (include "tandem.serviceHost" (dict "root" . "component" "master")) -}}
{{- end -}}
{{- end -}}

{{/* Towards the store's pods, which listen on ports of their choice: root, of */}}
{{- define "tandem.kvStoreEgress" -}}
{{- if and (include "tandem.hasKvStore" .) (eq .root.Values.kvStore.kind "chart") }}
{{- range $component := list "master" "store" }}
- to: [{podSelector: {matchLabels: {{ include "tandem.selectorLabels" (dict "root" $.root "component" $component) | fromYaml | toJson }}}}]
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.mistakes.kvStore" -}}
{{- $store := .root.Values.kvStore -}}
{{- if and (eq $store.kind "url") (not $store.url) -}}
{{- include "tandem.mistake" (dict "found" .found "text" "kvStore.kind is url: set kvStore.url to mooncake://HOST:PORT of the master") -}}
{{- else if and (ne $store.kind "url") $store.url -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "kvStore.url is set, but kvStore.kind is %s: set it to url" $store.kind)) -}}
{{- end -}}
{{- if ne $store.kind "none" -}}
{{- $uses := false -}}
{{- range .tiers -}}{{- if .kvTiers.hostGiB -}}{{- $uses = true -}}{{- end -}}{{- end -}}
{{- if not $uses -}}
{{- include "tandem.mistake" (dict "found" .found "text" "kvStore lies behind host memory: set prefill.kvTiers.hostGiB, decode.kvTiers.hostGiB or both") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.kvTierMounts" -}}
{{- if .of.kvTiers.hostGiB }}
- name: kv-memory
  mountPath: /var/lib/tandem/kv/memory
{{- end }}
{{- if .of.kvTiers.diskGiB }}
- name: kv-disk
  mountPath: /var/lib/tandem/kv/disk
{{- end }}
{{- end -}}

{{/* A volume has some room for what is not KV: headers, and names of files. */}}
{{- define "tandem.kvTierVolumes" -}}
{{- if .of.kvTiers.hostGiB }}
- name: kv-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ printf "%dGi" (add 1 (include "tandem.kvHostGiB" . | int)) | quote }}
{{- end }}
{{- if .of.kvTiers.diskGiB }}
{{- $disk := .of.kvTiers.disk }}
{{- $size := printf "%dGi" (add 1 (include "tandem.kvDiskGiB" . | int)) }}
- name: kv-disk
  {{- if eq $disk.type "hostPath" }}
  hostPath:
    path: {{ $disk.hostPath | quote }}
    type: DirectoryOrCreate
  {{- else if eq $disk.type "ephemeral" }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $disk.storageClass }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources:
          requests:
            storage: {{ $size | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $size | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.mistakes.kvTiers" -}}
{{- $tiers := .of.kvTiers -}}
{{- if and $tiers.diskGiB (not $tiers.hostGiB) -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "%s.kvTiers.diskGiB needs %s.kvTiers.hostGiB: all KV that leaves the cache goes through host memory" .name .name)) -}}
{{- end -}}
{{- $caches := ternary .of.settings.enablePrefixCaching (ne .name "decode") (hasKey .of.settings "enablePrefixCaching") -}}
{{- if and $tiers.hostGiB (not $caches) -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "%s.kvTiers.hostGiB is for blocks that the prefix cache knows: set %s.settings.enablePrefixCaching to true" .name .name)) -}}
{{- end -}}
{{- if and $tiers.diskGiB (eq $tiers.disk.type "hostPath") (not $tiers.disk.hostPath) -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "%s.kvTiers.disk.type is hostPath: say where in %s.kvTiers.disk.hostPath" .name .name)) -}}
{{- end -}}
{{- end -}}
