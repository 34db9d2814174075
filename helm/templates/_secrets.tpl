{{/* A secret that is made at the first install and kept by upgrades, under whatever key: root,
  component, key.
  `helm template` cannot look it up and makes another each time: there, name one of your own. */}}
{{- define "tandem.madeSecret" -}}
{{- $name := include "tandem.name" . -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace $name -}}
{{- $value := randAlphaNum 43 | b64enc -}}
{{- $kept := get $old "data" | default dict -}}
{{- range $kept }}{{- $value = . -}}{{- end -}}
{{- $value = get $kept .key | default $value -}}
apiVersion: v1
kind: Secret
metadata: {{- include "tandem.metadata" . | nindent 2 }}
type: Opaque
data:
  {{ .key | quote }}: {{ $value | quote }}
{{- end -}}

{{/* Name of the secret with the clients' keys; empty: nobody needs one. */}}
{{- define "tandem.apiKeySecret" -}}
{{- .Values.auth.apiKeys.existingSecret -}}
{{- end -}}

{{/* Name of the secret with the key that the router shows to decode nodes; empty: none is asked. */}}
{{- define "tandem.nodeKeySecret" -}}
{{- $key := .Values.auth.nodeKey -}}
{{- if $key.enabled -}}
{{- default (include "tandem.name" (dict "root" . "component" "node-key")) $key.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* Name of the secret with the token of Ray inside the groups. */}}
{{- define "tandem.rayTokenSecret" -}}
{{- default (include "tandem.name" (dict "root" . "component" "ray-token")) .Values.auth.rayToken.existingSecret -}}
{{- end -}}

{{/* Whether a node of some tier spans hosts. */}}
{{- define "tandem.hasGroups" -}}
{{- $scopes := dict -}}
{{- include "tandem.tierScopes" (dict "root" . "into" $scopes) -}}
{{- range $scopes.list -}}
{{- if gt (int .of.parallelism.hosts) 1 }}true{{ end -}}
{{- end -}}
{{- end -}}
