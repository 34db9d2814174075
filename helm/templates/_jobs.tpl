{{/* Pods that end: the download, the calibration and the test of the release. */}}

{{/* Labels of such a pod: root, component */}}
{{- define "tandem.jobLabels" -}}
{{ include "tandem.selectorLabels" . }}
{{- with .root.Values.jobs.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What they have in common at the level of a pod's spec, and where they run: root, of */}}
{{- define "tandem.jobSpec" -}}
restartPolicy: Never
enableServiceLinks: false
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .of.podSecurityContext | nindent 2 }}
{{- range $key := list "priorityClassName" "runtimeClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with get $.of $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A Job cannot change: one that would is another Job. Numbers are parsed before, since versions of Helm
  write them differently. Kueue keeps the labels that it reads as they are. root, component, spec (as text), labels */}}
{{- define "tandem.jobName" -}}
{{- $read := ternary (toJson .labels) "" (not (empty .labels)) -}}
{{- printf "%s-%s" (include "tandem.name" .) (printf "%s%s" (fromYaml .spec | toJson) $read | sha256sum | trunc 8) -}}
{{- end -}}

{{/* The init containers of a tier that may bring the model, since they mount its volume, and the one that waits
  for its download. Others may mount volumes that a Job lacks, and would see its token. root, of (the tier) */}}
{{- define "tandem.modelBringers" -}}
{{- $found := list -}}
{{- range .of.initContainers -}}
{{- $brings := false -}}
{{- range .volumeMounts -}}{{- if eq .name "models" -}}{{- $brings = true -}}{{- end -}}{{- end -}}
{{- if $brings -}}{{- $found = append $found . -}}{{- end -}}
{{- end -}}
{{- if include "tandem.isPreloaded" .root -}}
{{- $found = concat $found (include "tandem.preloadWait" . | fromYamlArray) -}}
{{- end -}}
{{- with $found }}
initContainers: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Puts what a node has that changes its speed into `into`, of what `tandem bench` takes: root, of, into */}}
{{- define "tandem.benchSettings" -}}
{{- $model := .root.Values.model -}}
{{- $found := pick .of.settings "quantization" "loadFormat" "blockSize" "maxNumSeqs" "maxNumBatchedTokens" "gpuMemoryUtilization" -}}
{{- if ne $model.revision "" -}}{{- $_ := set $found "revision" $model.revision -}}{{- end -}}
{{- if ne $model.dtype "auto" -}}{{- $_ := set $found "dtype" $model.dtype -}}{{- end -}}
{{- $_ := merge .into $found (dict "kvCacheDtype" $model.kvCacheDtype) -}}
{{- end -}}

{{/* Spec of the Job that measures a node's speed: root, component, of (the decode tier) */}}
{{- define "tandem.calibrationJob" -}}
{{- $root := .root -}}
{{- $calibration := .root.Values.calibration -}}
{{- $patches := eq $calibration.output "configMap" -}}
{{- $tier := dict "root" .root "component" "decode" "of" .of "part" "" -}}
{{- $settings := dict -}}
{{- include "tandem.benchSettings" (merge (dict "into" $settings) .) -}}
backoffLimit: 1
activeDeadlineSeconds: {{ add (int $calibration.timeoutSeconds) (include "tandem.preloadSeconds" .) }}
template:
  metadata:
    labels: {{- include "tandem.jobLabels" . | nindent 6 }}
    {{- with .root.Values.jobs.podAnnotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    {{- include "tandem.jobSpec" . | nindent 4 }}
    {{- if $patches }}
    serviceAccountName: {{ include "tandem.serviceAccountName" . | quote }}
    {{- end }}
    automountServiceAccountToken: {{ $patches }}
    {{- include "tandem.resourceClaims" $tier | nindent 4 }}
    {{- include "tandem.modelBringers" . | nindent 4 }}
    containers:
      - name: bench
        image: {{ include "tandem.image" (dict "root" $root "image" $root.Values.image.engine) | quote }}
        imagePullPolicy: {{ $root.Values.image.engine.pullPolicy | quote }}
        command: [tandem, bench]
        args:
          - {{ printf "--model=%s" (include "tandem.modelArgument" $root) | quote }}
          - --tensor-parallel-size={{ int .of.parallelism.tensor }}
          - --device={{ ternary "cuda" "cpu" .of.gpu.enabled }}
          {{- include "tandem.flags" $settings | nindent 10 }}
          {{- if $patches }}
          - {{ printf "--config-map=%s" (include "tandem.name" .) | quote }}
          {{- else }}
          - {{ printf "--output=/profiles/%s.json" (default "profile" $root.modelKey) | quote }}
          {{- end }}
          {{- range $calibration.extraArgs }}
          - {{ . | quote }}
          {{- end }}
        {{- include "tandem.envFrom" . | nindent 8 }}
        env:
          {{- include "tandem.modelEnv" $root | nindent 10 }}
          {{- with .of.env }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
        resources: {{- include "tandem.tierResources" $tier | nindent 10 }}
        securityContext: {{- toYaml .of.securityContext | nindent 10 }}
        volumeMounts:
          - name: models
            mountPath: /models
          - name: shm
            mountPath: /dev/shm
          - name: cache
            mountPath: /cache
          - name: tmp
            mountPath: /tmp
          {{- if not $patches }}
          - name: calibration-profiles
            mountPath: /profiles
          {{- end }}
          {{- with .of.extraVolumeMounts }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
    volumes:
      {{- include "tandem.modelVolume" $root | nindent 6 }}
      - name: shm
        emptyDir: {medium: Memory, sizeLimit: {{ .of.shm.sizeLimit | quote }}}
      - name: cache
        emptyDir: {}
      - name: tmp
        emptyDir: {}
      {{- if not $patches }}
      - name: calibration-profiles
        persistentVolumeClaim:
          claimName: {{ $calibration.existingClaim | quote }}
      {{- end }}
      {{- with .of.extraVolumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}

{{/* Spec of the Job that downloads a model. It reaches the hub as nodes would: through their proxy, and
  with the certificates that they have. root, component, of (the defaults of tiers) */}}
{{- define "tandem.preloadJob" -}}
{{- $root := .root -}}
{{- $preload := $root.Values.model.preload -}}
{{- $place := dict "podSecurityContext" .of.podSecurityContext "nodeSelector" $preload.nodeSelector "tolerations" $preload.tolerations -}}
backoffLimit: {{ int $preload.backoffLimit }}
activeDeadlineSeconds: {{ int $preload.timeoutSeconds }}
template:
  metadata:
    labels: {{- include "tandem.jobLabels" . | nindent 6 }}
    {{- with $root.Values.jobs.podAnnotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    {{- include "tandem.jobSpec" (dict "root" $root "of" $place) | nindent 4 }}
    automountServiceAccountToken: false
    containers:
      - name: download
        image: {{ include "tandem.image" (dict "root" $root "image" $root.Values.image.engine) | quote }}
        imagePullPolicy: {{ $root.Values.image.engine.pullPolicy | quote }}
        command: [tandem, download]
        args:
          - {{ $root.Values.model.name | quote }}
          {{- with $root.Values.model.revision }}
          - {{ printf "--revision=%s" . | quote }}
          {{- end }}
          - {{ printf "--mark=%s" (include "tandem.preloadMark" $root) | quote }}
        {{- include "tandem.envFrom" . | nindent 8 }}
        env:
          - name: HF_HOME
            value: /models
          {{- include "tandem.hubEnv" $root | nindent 10 }}
          {{- with .of.env }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
        resources: {{- toYaml $preload.resources | nindent 10 }}
        securityContext: {{- toYaml .of.securityContext | nindent 10 }}
        volumeMounts:
          - name: models
            mountPath: /models
          - name: tmp
            mountPath: /tmp
          {{- with .of.extraVolumeMounts }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
    volumes:
      {{- include "tandem.modelVolume" $root | nindent 6 }}
      - name: tmp
        emptyDir: {}
      {{- with .of.extraVolumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}

{{/* root (of a model), tiers, found */}}
{{- define "tandem.mistakes.calibration" -}}
{{- $values := .root.Values -}}
{{- if $values.calibration.enabled -}}
{{- include "tandem.mistakes.flags" (dict "root" .root "found" .found "name" "calibration" "args" $values.calibration.extraArgs "program" "bench" "image" "engine") -}}
{{- if gt (int .tiers.decode.parallelism.hosts) 1 -}}
{{- include "tandem.mistake" (dict "found" .found "text" "calibration.enabled measures a node of one host, but decode.parallelism.hosts is more: set calibration.enabled to false, and measure by hand (tandem bench)") -}}
{{- end -}}
{{- if and (eq $values.calibration.output "claim") (not $values.calibration.existingClaim) -}}
{{- include "tandem.mistake" (dict "found" .found "text" "calibration.output is claim: set calibration.existingClaim") -}}
{{- end -}}
{{- if and (eq $values.calibration.output "configMap") (not $values.rbac.create) (or $values.serviceAccount.create (not $values.serviceAccount.name)) -}}
{{- include "tandem.mistake" (dict "found" .found "text" "rbac.create is false, so the calibration may not write its ConfigMap: set calibration.output to claim, or serviceAccount.create to false and serviceAccount.name to an account that may patch ConfigMaps") -}}
{{- end -}}
{{- end -}}
{{- end -}}
