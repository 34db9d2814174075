{{/* How services make sure of each other: mutual TLS, a token that all know, both, or nothing, which
  then is said. Files are mounted as whole folders, so that new ones arrive without a restart. */}}
{{- define "tandem.hasTls" -}}
{{- if ne .Values.tls.mode "none" }}true{{ end -}}
{{- end -}}

{{/* Name of the secret with a component's certificate: root, component */}}
{{- define "tandem.tlsSecret" -}}
{{- $tls := .root.Values.tls -}}
{{- if eq $tls.mode "existingSecret" -}}
{{- get $tls.existingSecret .component -}}
{{- else -}}
{{- include "tandem.name" . }}-tls
{{- end -}}
{{- end -}}

{{/* Name of the secret with the token; empty: none is shown. */}}
{{- define "tandem.clusterTokenSecret" -}}
{{- $token := .Values.auth.clusterToken -}}
{{- if $token.enabled -}}
{{- default (include "tandem.name" (dict "root" . "component" "cluster-token")) $token.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "tandem.securityFlags" -}}
{{- if include "tandem.hasTls" .root }}
- --tls-cert-file=/etc/tandem/tls/tls.crt
- --tls-key-file=/etc/tandem/tls/tls.key
- --tls-ca-file=/etc/tandem/tls/ca.crt
- --tls-identity=role
{{- if .root.Values.tls.acceptMissing }}
- --accept-missing-tls
{{- end }}
{{- end }}
{{- if .root.Values.auth.clusterToken.enabled }}
- --cluster-token-file=/etc/tandem/cluster-token/{{ .root.Values.auth.clusterToken.secretKey }}
{{- if .root.Values.auth.clusterToken.acceptMissing }}
- --accept-missing-token
{{- end }}
{{- else if not (include "tandem.hasTls" .root) }}
- --allow-plaintext
{{- end }}
{{- end -}}

{{- define "tandem.securityMounts" -}}
{{- if include "tandem.hasTls" .root }}
- name: tls
  mountPath: /etc/tandem/tls
  readOnly: true
{{- end }}
{{- if .root.Values.auth.clusterToken.enabled }}
- name: cluster-token
  mountPath: /etc/tandem/cluster-token
  readOnly: true
{{- end }}
{{- end -}}

{{- define "tandem.securityVolumes" -}}
{{- if include "tandem.hasTls" .root }}
- name: tls
  secret:
    secretName: {{ include "tandem.tlsSecret" . | quote }}
{{- end }}
{{- if .root.Values.auth.clusterToken.enabled }}
- name: cluster-token
  secret:
    secretName: {{ include "tandem.clusterTokenSecret" .root | quote }}
{{- end }}
{{- end -}}

{{/* The kinds of service that a component is, one a line. */}}
{{- define "tandem.certificateRoles" -}}
{{- range ternary (list "prefill" "decode") (list .) (eq . "node") }}
- {{ . }}
{{- end }}
{{- end -}}

{{/* Names in a component's certificate, one a line. The first say which kind of service it is: they
  are demanded, since pods are dialled by address. The others are for who asks by name. */}}
{{- define "tandem.certificateNames" -}}
{{- $host := include "tandem.serviceHost" . -}}
{{- range include "tandem.certificateRoles" .component | fromYamlArray }}
- tandem-{{ . }}
{{- end }}
- {{ include "tandem.name" . }}.{{ .root.Release.Namespace }}
- {{ include "tandem.name" . }}.{{ .root.Release.Namespace }}.svc
- {{ $host }}
{{- if ne .component "router" }}
- {{ printf "*.%s" $host | quote }}
{{- end }}
{{- end -}}

{{/* A certificate that ends so soon should have been renewed: two weeks, or half of the time that
  cert-manager takes for it. */}}
{{- define "tandem.lateRenewalSeconds" -}}
{{- $manager := .Values.tls.certManager -}}
{{- ternary (mul 1800 (trimSuffix "h" $manager.renewBefore | int)) 1209600 (eq .Values.tls.mode "certManager") -}}
{{- end -}}
