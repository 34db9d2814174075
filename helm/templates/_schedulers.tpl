{{/* Queues and gangs: Kueue lets a pod be scheduled when its queue has room, Volcano schedules itself, and
  Kubernetes' own scheduler places gangs since 1.37. */}}

{{/* Labels of a tier's Deployment or LeaderWorkerSet. Kueue's webhooks hand them on to the pods, each
  of which waits behind a scheduling gate. */}}
{{- define "tandem.queueLabels" -}}
{{- $scheduling := .Values.scheduling -}}
{{- if eq $scheduling.kind "kueue" }}
kueue.x-k8s.io/queue-name: {{ $scheduling.queue | quote }}
{{- with $scheduling.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Annotations of a tier's LeaderWorkerSet, whose operator makes a PodGroup of each group. */}}
{{- define "tandem.queueAnnotations" -}}
{{- $scheduling := .root.Values.scheduling -}}
{{- if and (eq $scheduling.kind "volcano") $scheduling.queue (gt (int .of.parallelism.hosts) 1) }}
scheduling.volcano.sh/queue-name: {{ $scheduling.queue | quote }}
{{- end }}
{{- end -}}

{{/* Annotations of a tier's pods: root, of, part */}}
{{- define "tandem.schedulerPodAnnotations" -}}
{{- $scheduling := .root.Values.scheduling -}}
{{- if and (eq $scheduling.kind "volcano") (not .part) }}
{{- with $scheduling.queue }}
scheduling.volcano.sh/queue-name: {{ . | quote }}
{{- end }}
{{- if $scheduling.minMember }}
scheduling.k8s.io/group-name: {{ include "tandem.fullname" .root | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The gang of a tier's pod, of Kubernetes' own kind: root, component, part */}}
{{- define "tandem.schedulingGroup" -}}
{{- $scheduling := .root.Values.scheduling -}}
{{- if and (eq $scheduling.kind "kubernetes") $scheduling.minMember (ne .component "router") (not .part) }}
schedulingGroup:
  podGroupName: {{ include "tandem.fullname" .root | quote }}
{{- end }}
{{- end -}}

{{/* Routers need no GPU: they stay with the cluster's own scheduler. root, component, of */}}
{{- define "tandem.schedulerName" -}}
{{- if .of.schedulerName -}}
{{- .of.schedulerName -}}
{{- else if and (eq .root.Values.scheduling.kind "volcano") (ne .component "router") -}}
volcano
{{- end -}}
{{- end -}}
