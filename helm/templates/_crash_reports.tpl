{{/* Where a dead engine leaves its report: a volume that outlives the container. Only a node that
  serves writes one. */}}
{{- define "tandem.writesCrashReports" -}}
{{- if and .root.Values.crashReports.enabled (ne .part "worker") }}true{{ end -}}
{{- end -}}

{{- define "tandem.crashReportFlags" -}}
{{- if include "tandem.writesCrashReports" . }}
- --crash-report-dir=/var/lib/tandem/crash
{{- end }}
{{- end -}}

{{- define "tandem.crashReportMounts" -}}
{{- if include "tandem.writesCrashReports" . }}
- name: crash-reports
  mountPath: /var/lib/tandem/crash
{{- end }}
{{- end -}}

{{- define "tandem.crashReportVolumes" -}}
{{- $reports := .root.Values.crashReports -}}
{{- if include "tandem.writesCrashReports" . }}
- name: crash-reports
  {{- if $reports.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ $reports.existingClaim | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $reports.sizeLimit | quote }}
  {{- end }}
{{- end }}
{{- end -}}
