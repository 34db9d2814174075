{{/* Where the checkpoint is. With `path` the volume holds it, and is mounted read-only; without,
  the volume is a cache of the hub. */}}
{{- define "tandem.modelArgument" -}}
{{- $storage := .Values.model.storage -}}
{{- if $storage.path -}}
{{- printf "/models/%s" (trimPrefix "/" $storage.path) -}}
{{- else if eq $storage.type "image" -}}
/models
{{- else -}}
{{- .Values.model.name -}}
{{- end -}}
{{- end -}}

{{- define "tandem.modelIsLocal" -}}
{{- if or .Values.model.storage.path (eq .Values.model.storage.type "image") }}true{{ end -}}
{{- end -}}

{{/* Whether the volume is a complete cache of the hub on a claim that no pod may write to. */}}
{{- define "tandem.cacheIsReadOnly" -}}
{{- $storage := .Values.model.storage -}}
{{- $mayWrite := list "ReadWriteMany" "ReadWriteOnce" "ReadWriteOncePod" -}}
{{- if and (eq $storage.type "pvc") (not (include "tandem.modelIsLocal" .)) .Values.model.hub.offline -}}
{{- $written := false -}}
{{- range $storage.pvc.accessModes -}}{{- if has . $mayWrite -}}{{- $written = true -}}{{- end -}}{{- end -}}
{{- if not $written }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* Whether pods only read the volume. */}}
{{- define "tandem.modelIsReadOnly" -}}
{{- if or (include "tandem.modelIsLocal" .) (include "tandem.cacheIsReadOnly" .) }}true{{ end -}}
{{- end -}}

{{- define "tandem.modelFlags" -}}
- {{ printf "--model=%s" (include "tandem.modelArgument" .) | quote }}
{{- $model := .Values.model }}
{{- include "tandem.flags" (dict
      "revision" (ternary $model.revision nil (ne $model.revision ""))
      "servedModelName" $model.servedName
      "dtype" $model.dtype
      "kvCacheDtype" $model.kvCacheDtype
      "maxModelLen" $model.maxModelLen) }}
{{- end -}}

{{/* What a pod must find free on its host to download the model into its own volume. */}}
{{- define "tandem.downloadSize" -}}
{{- $storage := .Values.model.storage -}}
{{- if eq $storage.type "emptyDir" -}}{{- $storage.emptyDir.sizeLimit -}}{{- end -}}
{{- end -}}

{{- define "tandem.modelVolume" -}}
{{- $storage := .Values.model.storage -}}
- name: models
{{- if eq $storage.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ default (include "tandem.name" (dict "root" . "component" "models")) $storage.pvc.existingClaim | quote }}
    {{- if include "tandem.modelIsReadOnly" . }}
    readOnly: true
    {{- end }}
{{- else if eq $storage.type "hostPath" }}
  hostPath:
    path: {{ $storage.hostPath.path | quote }}
    type: {{ $storage.hostPath.type | quote }}
{{- else if eq $storage.type "image" }}
  image:
    reference: {{ $storage.image.reference | quote }}
    pullPolicy: {{ $storage.image.pullPolicy | quote }}
{{- else }}
  emptyDir:
    {{- if $storage.emptyDir.sizeLimit }}
    sizeLimit: {{ $storage.emptyDir.sizeLimit | quote }}
    {{- else }} {}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Whether a Job downloads the model before the tiers' pods start. */}}
{{- define "tandem.isPreloaded" -}}
{{- if ne .Values.model.preload.kind "none" }}true{{ end -}}
{{- end -}}

{{/* File in the volume that says that the model is complete, for one name and revision. */}}
{{- define "tandem.preloadMark" -}}
{{- $model := .Values.model -}}
/models/.tandem/{{ printf "%s@%s" $model.name $model.revision | sha256sum | trunc 16 }}
{{- end -}}

{{/* Pods wait for the model, and then need no hub. */}}
{{- define "tandem.preloadWait" -}}
- name: wait-for-model
  image: {{ include "tandem.image" (dict "root" .root "image" .root.Values.image.engine) | quote }}
  imagePullPolicy: {{ .root.Values.image.engine.pullPolicy | quote }}
  command:
    - sh
    - -c
    - |
      until [ -e "$MARK" ]; do
        echo "waiting for the download of the model; look at the Job of {{ include "tandem.name" (dict "root" .root "component" "preload") }}"
        sleep 5
      done
  env:
    - name: MARK
      value: {{ include "tandem.preloadMark" .root | quote }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {cpu: 100m, memory: 64Mi}
  securityContext: {{- toYaml .of.securityContext | nindent 4 }}
  volumeMounts:
    - name: models
      mountPath: /models
      readOnly: true
{{- end -}}

{{/* The hub's client library reads these itself. What we make of a checkpoint, such as GGUF converted,
  is kept in HF_HOME, which pods must be able to write to. */}}
{{- define "tandem.modelEnv" -}}
{{- $hub := .Values.model.hub -}}
{{- if include "tandem.modelIsLocal" . }}
- name: HF_HUB_OFFLINE
  value: "1"
- name: HF_HOME
  value: /cache/huggingface
{{- else if include "tandem.cacheIsReadOnly" . }}
- name: HF_HUB_OFFLINE
  value: "1"
- name: HF_HOME
  value: /cache/huggingface
- name: HF_HUB_CACHE
  value: /models/hub
{{- else }}
- name: HF_HOME
  value: /models
{{- if or $hub.offline (include "tandem.isPreloaded" .) }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- else }}
{{- include "tandem.hubEnv" . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* How the hub is reached. */}}
{{- define "tandem.hubEnv" -}}
{{- $hub := .Values.model.hub -}}
{{- with $hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with $hub.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $hub.secretKey | quote }}
{{- end }}
{{- end -}}
