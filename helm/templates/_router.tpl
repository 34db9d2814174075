{{- define "tandem.routerArgs" -}}
{{- $router := .of -}}
{{- $listen := default (include "tandem.everyAddress" .root) $router.listen -}}
- {{ printf "--host=%s" $listen | quote }}
- --port={{ int $router.ports.http }}
- {{ printf "--admin-host=%s" $listen | quote }}
- --admin-port={{ int $router.ports.admin }}
{{- include "tandem.securityFlags" . }}
{{- if $router.https.enabled }}
{{- $folder := ternary "https" "tls" (ne $router.https.existingSecret "") }}
- --https-cert-file=/etc/tandem/{{ $folder }}/tls.crt
- --https-key-file=/etc/tandem/{{ $folder }}/tls.key
{{- end }}
{{- if include "tandem.apiKeySecret" .root }}
- {{ printf "--api-key-file=/etc/tandem/api-keys/%s" .root.Values.auth.apiKeys.secretKey | quote }}
{{- end }}
{{- if include "tandem.modelRules" .root }}
- --model-rules-file=/etc/tandem/model-rules/rules.toml
{{- end }}
{{- include "tandem.discoveryFlags" . }}
- --drain-delay-s={{ int $router.drain.preStopSeconds }}
- --drain-timeout-s={{ int $router.drain.drainSeconds }}
{{- $replicas := ternary $router.replicas $router.autoscaling.minReplicas (eq $router.autoscaling.kind "none") }}
{{- include "tandem.serviceFlags" (dict "root" .root "settings" (merge (deepCopy $router.settings) (dict "numRouters" $replicas))) }}
{{- end -}}

{{/* Which nodes there are: the pods of the tiers' headless Services, or written down. */}}
{{- define "tandem.discoveryFlags" -}}
{{- $root := .root -}}
{{- $discovery := .of.discovery -}}
{{- if eq $discovery.type "static" }}
{{- with $discovery.prefill }}
- {{ printf "--prefill=%s" (join "," .) | quote }}
{{- end }}
- {{ printf "--decode=%s" (join "," $discovery.decode) | quote }}
{{- else }}
{{- $scopes := dict }}
{{- include "tandem.tierScopes" (dict "root" $root "into" $scopes) }}
{{- $prefills := list }}
{{- $decodes := list }}
{{- range $scope := $scopes.list }}
{{- $service := include "tandem.discovered" $scope }}
{{- if eq $scope.component "prefill" }}
{{- $prefills = append $prefills (printf "%s:%d" $service (int $scope.of.ports.grpc)) }}
{{- else }}
{{- $decodes = append $decodes (printf "%s:%d/%d" $service (int $scope.of.ports.http) (int $scope.of.ports.grpc)) }}
{{- end }}
{{- end }}
{{- with $prefills }}
- {{ printf "--prefill=%s" (join "," .) | quote }}
{{- end }}
- {{ printf "--decode=%s" (join "," $decodes) | quote }}
{{- end }}
{{- end -}}

{{- define "tandem.discovered" -}}
{{- if eq .root.Values.router.discovery.type "dns" -}}
dns://{{ include "tandem.serviceHost" . }}
{{- else -}}
k8s://{{ include "tandem.name" . }}.{{ .root.Release.Namespace }}
{{- end -}}
{{- end -}}

{{- define "tandem.serviceHost" -}}
{{- printf "%s.%s.svc.%s" (include "tandem.name" .) .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{/* The claim of the file that a router keeps batches in; empty: there is none. */}}
{{- define "tandem.batchClaim" -}}
{{- with .of.batchStore -}}
{{- if .existingClaim -}}{{ .existingClaim }}
{{- else if .size -}}{{ include "tandem.name" (dict "root" $.root "component" "batches") }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.routerEnv" -}}
{{- include "tandem.podIp" . }}
{{- with .of.responseStore }}
{{- if .existingSecret }}
- name: TANDEM_ROUTER_RESPONSE_STORE
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret | quote }}
      key: {{ .secretKey | quote }}
{{- else if .existingClaim }}
- name: TANDEM_ROUTER_RESPONSE_STORE
  value: sqlite:////var/lib/tandem/responses/responses.db
{{- end }}
{{- end }}
{{- if .of.batchStore.existingSecret }}
- name: TANDEM_ROUTER_BATCH_STORE
  valueFrom:
    secretKeyRef:
      name: {{ .of.batchStore.existingSecret | quote }}
      key: {{ .of.batchStore.secretKey | quote }}
{{- else if include "tandem.batchClaim" . }}
- name: TANDEM_ROUTER_BATCH_STORE
  value: sqlite:////var/lib/tandem/batches/batches.db
{{- end }}
{{- include "tandem.tracesEnv" (dict "root" .root "name" "router") }}
{{- $auth := .root.Values.auth }}
{{- if include "tandem.nodeKeySecret" .root }}
- name: TANDEM_ROUTER_NODE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "tandem.nodeKeySecret" .root | quote }}
      key: {{ $auth.nodeKey.secretKey | quote }}
{{- end }}
{{- with .of.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.routerMounts" -}}
- name: tmp
  mountPath: /tmp
{{- include "tandem.securityMounts" . | nindent 0 }}
{{- if .of.https.existingSecret }}
- name: https
  mountPath: /etc/tandem/https
  readOnly: true
{{- end }}
{{- if include "tandem.apiKeySecret" .root }}
- name: api-keys
  mountPath: /etc/tandem/api-keys
  readOnly: true
{{- end }}
{{- if include "tandem.modelRules" .root }}
- name: model-rules
  mountPath: /etc/tandem/model-rules
  readOnly: true
{{- end }}
{{- if .of.responseStore.existingClaim }}
- name: responses
  mountPath: /var/lib/tandem/responses
{{- end }}
{{- if include "tandem.batchClaim" . }}
- name: batches
  mountPath: /var/lib/tandem/batches
{{- end }}
{{- with .of.extraVolumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "tandem.routerVolumes" -}}
- name: tmp
  emptyDir: {}
{{- include "tandem.securityVolumes" . | nindent 0 }}
{{- with .of.https.existingSecret }}
- name: https
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with include "tandem.apiKeySecret" .root }}
# The whole folder, so that changes arrive.
- name: api-keys
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with include "tandem.modelRules" .root }}
# Likewise.
- name: model-rules
  configMap:
    name: {{ . | quote }}
{{- end }}
{{- with .of.responseStore.existingClaim }}
- name: responses
  persistentVolumeClaim:
    claimName: {{ . | quote }}
{{- end }}
{{- with include "tandem.batchClaim" . }}
- name: batches
  persistentVolumeClaim:
    claimName: {{ . | quote }}
{{- end }}
{{- with .of.extraVolumes }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{/* The largest body that a router takes, as nginx writes it: of a request, or of a file for batches, which
  has a form around it. */}}
{{- define "tandem.largestBody" -}}
{{- $router := .Values.router -}}
{{- $most := divf (default 8388608 $router.settings.maxBodyBytes) 1048576 | ceil | int -}}
{{- with $router.batchStore -}}
{{- if or .existingSecret .existingClaim .size -}}
{{- $most = max $most (add1 (int (default 512 $router.settings.batchMaxFileMib))) -}}
{{- end -}}
{{- end -}}
{{- printf "%dm" (int $most) -}}
{{- end -}}
