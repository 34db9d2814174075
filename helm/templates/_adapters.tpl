{{/* Adapters (LoRA) of a model: both tiers get the same flags and the same volume, under one path. */}}

{{/* Where the volume is mounted: --lora-dir, below which modules lie. */}}
{{- define "tandem.adapterFolder" -}}
/adapters
{{- end -}}

{{/* Whether any model has adapters. */}}
{{- define "tandem.hasAdapters" -}}
{{- $models := dict -}}
{{- include "tandem.models" (dict "root" . "into" $models) -}}
{{- range $models.list -}}{{- if .Values.model.adapters.enabled }}true{{ end -}}{{- end -}}
{{- end -}}

{{- define "tandem.adapterFlags" -}}
{{- $adapters := .root.Values.model.adapters -}}
{{- if $adapters.enabled }}
- --enable-lora
- --max-loras={{ int $adapters.maxLoras }}
- --max-lora-rank={{ int $adapters.maxRank }}
{{- with $adapters.maxCpuLoras }}
- --max-cpu-loras={{ int . }}
{{- end }}
{{- /* A flag each: the kernel starts no program with one argument of 128 KiB, some 2,000 modules. */}}
{{- range $name, $folder := $adapters.modules }}
- {{ printf "--lora-modules=%s=%s/%s" $name (include "tandem.adapterFolder" $) $folder | quote }}
{{- end }}
{{- if $adapters.loadable }}
- --lora-dir={{ include "tandem.adapterFolder" . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.adapterMounts" -}}
{{- if .root.Values.model.adapters.enabled }}
- name: adapters
  mountPath: {{ include "tandem.adapterFolder" . }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "tandem.adapterVolumes" -}}
{{- $adapters := .root.Values.model.adapters -}}
{{- if $adapters.enabled }}
{{- $volume := $adapters.volume }}
- name: adapters
  {{- if eq $volume.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $volume.claim | quote }}
    readOnly: true
  {{- else if eq $volume.type "image" }}
  image:
    reference: {{ $volume.image | quote }}
  {{- else }}
  hostPath:
    path: {{ $volume.hostPath | quote }}
    type: Directory
  {{- end }}
{{- end }}
{{- end -}}

{{/* How many bytes of host memory the ranks of one pod have for adapters: root, of */}}
{{- define "tandem.adapterBytes" -}}
{{- $adapters := .root.Values.model.adapters -}}
{{- $ranks := include "tandem.podRanks" .of | int -}}
{{- ternary (mul (int $adapters.hostGiB) $ranks 1073741824) 0 $adapters.enabled -}}
{{- end -}}

{{- define "tandem.mistakes.adapters" -}}
{{- $adapters := .root.Values.model.adapters -}}
{{- if $adapters.enabled -}}
{{- $field := get (dict "pvc" "claim" "image" "image" "hostPath" "hostPath") $adapters.volume.type -}}
{{- if not (get $adapters.volume $field) -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "model.adapters.volume.type is %s: say in model.adapters.volume.%s where the adapters are" $adapters.volume.type $field)) -}}
{{- end -}}
{{- if not (or $adapters.modules $adapters.loadable) -}}
{{- include "tandem.mistake" (dict "found" .found "text" "model.adapters.enabled without model.adapters.modules and with loadable false: there would never be an adapter") -}}
{{- end -}}
{{- with $adapters.maxCpuLoras -}}{{- if lt (int .) (int $adapters.maxLoras) -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "model.adapters.maxCpuLoras (%d) is less than maxLoras (%d): slots are filled from host memory; raise it" (int .) (int $adapters.maxLoras))) -}}
{{- end -}}{{- end -}}
{{- if gt (int .of.parallelism.pipeline) 1 -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "model.adapters does not work with %s.parallelism.pipeline: set it to 1, and use tensor" .name)) -}}
{{- end -}}
{{- range $setting := list "enableLora" "loraModules" "loraDir" "maxLoras" "maxLoraRank" "maxCpuLoras" -}}
{{- if hasKey $.of.settings $setting -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s.settings.%s is said by model.adapters, for both tiers: remove it" $.name $setting)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
