{{/* Where kernels are kept that Triton and the GPU's driver compile at the first start: with a volume
  of its own, the next start finds them. */}}
{{- define "tandem.cacheIsKept" -}}
{{- if ne .Values.compileCache.type "emptyDir" }}true{{ end -}}
{{- end -}}

{{- define "tandem.cacheEnv" -}}
{{- $folder := ternary "/cache/compiled" "/cache" (ne (include "tandem.cacheIsKept" .) "") }}
- name: TRITON_CACHE_DIR
  value: {{ $folder }}/triton
{{- if include "tandem.cacheIsKept" . }}
- name: CUDA_CACHE_PATH
  value: {{ $folder }}/cuda
{{- end }}
{{- end -}}

{{- define "tandem.cacheMounts" -}}
- name: cache
  mountPath: /cache
{{- if include "tandem.cacheIsKept" . }}
- name: compiled
  mountPath: /cache/compiled
{{- end }}
{{- end -}}

{{- define "tandem.cacheVolumes" -}}
{{- $cache := .Values.compileCache -}}
- name: cache
  emptyDir: {}
{{- if eq $cache.type "pvc" }}
- name: compiled
  persistentVolumeClaim:
    claimName: {{ default (include "tandem.name" (dict "root" . "component" "compiled")) $cache.pvc.existingClaim | quote }}
{{- else if eq $cache.type "hostPath" }}
- name: compiled
  hostPath:
    path: {{ $cache.hostPath.path | quote }}
    type: {{ $cache.hostPath.type | quote }}
{{- end }}
{{- end -}}
