{{/* Names and labels.
  A name has at most 38 characters, so that what Kubernetes and the chart append
  (-prefill, a ReplicaSet's hash, a pod's suffix) stays below 63. What is cut off is told apart by
  a hash: releases whose names agree in their beginning are not one. */}}
{{- define "tandem.bounded" -}}
{{- $whole := . -}}
{{- if gt (len $whole) 38 -}}
{{- $whole = printf "%s-%s" ($whole | trunc 31 | trimSuffix "-") (sha256sum $whole | trunc 6) -}}
{{- end -}}
{{- $whole | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $whole := printf "%s-%s" .Release.Name $name -}}
{{- if .Values.fullnameOverride -}}
{{- $whole = .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- $whole = .Release.Name -}}
{{- end -}}
{{- include "tandem.bounded" $whole -}}
{{- end -}}

{{/* The entry of `models` that a component is of; empty for that of `model`, and for what serves all
  of them: root, component */}}
{{- define "tandem.modelKey" -}}
{{- if has (toString .component) (list "prefill" "decode" "node" "pool" "preload" "calibration") -}}{{- get .root "modelKey" -}}{{- end -}}
{{- end -}}

{{/* component name: root, component */}}
{{- define "tandem.name" -}}
{{- $name := include "tandem.fullname" .root -}}
{{- with include "tandem.modelKey" . -}}
{{- $name = include "tandem.bounded" (printf "%s-%s" $name .) -}}
{{- end -}}
{{- printf "%s-%s" $name .component -}}
{{- end -}}

{{/* Value of the label app.kubernetes.io/component: root, component */}}
{{- define "tandem.componentLabel" -}}
{{- $key := include "tandem.modelKey" . -}}
{{- ternary .component (printf "%s-%s" $key .component) (eq $key "") -}}
{{- end -}}

{{/* What selectors select on: never a version, because selectors cannot change. */}}
{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- if .component }}
app.kubernetes.io/component: {{ include "tandem.componentLabel" . | quote }}
{{- end }}
{{- with get .root "modelKey" }}
tandem.dev/model: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Labels of objects. Not of pods: a new chart version must not restart a pod. */}}
{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object: root, component, name (default: the component's), labels, annotations */}}
{{- define "tandem.metadata" -}}
name: {{ default (include "tandem.name" .) .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := merge (default (dict) .annotations) .root.Values.commonAnnotations }}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.serviceAccountName" -}}
{{- $account := .root.Values.serviceAccount -}}
{{- if $account.create -}}
{{- include "tandem.name" . -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}

{{/* image: root, image */}}
{{- define "tandem.image" -}}
{{- $registry := default .image.registry .root.Values.global.imageRegistry -}}
{{- $repository := .image.repository -}}
{{- if $registry }}{{- $repository = printf "%s/%s" $registry $repository -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}
