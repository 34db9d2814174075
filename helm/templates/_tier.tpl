{{/* The pod of a tier: root, component (prefill, decode or node), of (the tier's values), and `part`, if
  a node spans hosts: leader, which serves, or worker. One template for all; where they differ,
  it says so. */}}
{{- define "tandem.tierPod" -}}
metadata:
  labels: {{- include "tandem.podLabels" . | nindent 4 }}
  {{- include "tandem.tierAnnotations" . | nindent 2 }}
spec:
  {{- include "tandem.podCommon" . | nindent 2 }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ include "tandem.graceSeconds" .of.drain }}
  {{- include "tandem.initContainers" . | nindent 2 }}
  containers:
    - name: engine
      image: {{ include "tandem.image" (dict "root" .root "image" .root.Values.image.engine) | quote }}
      imagePullPolicy: {{ .root.Values.image.engine.pullPolicy | quote }}
      command: {{- include "tandem.tierCommand" . | trim | nindent 8 }}
      {{- if ne .part "worker" }}
      args:
        {{- include "tandem.tierArgs" . | trim | nindent 8 }}
        {{- include "tandem.extraArgs" . | nindent 8 }}
      {{- end }}
      {{- include "tandem.envFrom" . | nindent 6 }}
      env: {{- include "tandem.tierEnv" . | trim | nindent 8 }}
      {{- if eq .part "worker" }}
      {{- include "tandem.rayWorkerLife" . | nindent 6 }}
      {{- else }}
      ports: {{- include "tandem.tierPorts" . | trim | nindent 8 }}
      {{- include "tandem.tierProbes" . | nindent 6 }}
      {{- if .of.drain.preStopSeconds }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ .of.drain.preStopSeconds | int | quote }}]
      {{- end }}
      {{- end }}
      resources: {{- include "tandem.tierResources" . | nindent 8 }}
      securityContext: {{- include "tandem.tierSecurityContext" . | nindent 8 }}
      volumeMounts: {{- include "tandem.tierMounts" . | trim | nindent 8 }}
    {{- include "tandem.extraContainers" . | nindent 4 }}
  volumes: {{- include "tandem.tierVolumes" . | trim | nindent 4 }}
{{- end -}}

{{- define "tandem.tierArgs" -}}
{{- $tier := .of -}}
{{- include "tandem.modelFlags" .root }}
- {{ printf "--host=%s" $tier.listen | quote }}
- --metrics-port={{ int $tier.ports.metrics }}
{{- include "tandem.securityFlags" . }}
{{- if eq .component "prefill" }}
- --port={{ int $tier.ports.grpc }}
{{- include "tandem.kvHostFlags" . }}
- --kv-port={{ int $tier.ports.kv }}
{{- else }}
- --port={{ int $tier.ports.http }}
- --grpc-port={{ int $tier.ports.grpc }}
{{- if eq .component "node" }}
- --role={{ $tier.role }}
{{- end }}
{{- include "tandem.kvHostFlags" . }}
{{- if include "tandem.givesKv" . }}
- --kv-port={{ int $tier.ports.kv }}
{{- end }}
{{- if include "tandem.nodeKeySecret" .root }}
- --api-key-file=/etc/tandem/node-key/{{ .root.Values.auth.nodeKey.secretKey }}
{{- end }}
{{- end }}
- --tensor-parallel-size={{ int $tier.parallelism.tensor }}
{{- if gt (int $tier.parallelism.pipeline) 1 }}
- --pipeline-parallel-size={{ int $tier.parallelism.pipeline }}
{{- end }}
{{- if gt (int $tier.parallelism.data) 1 }}
- --data-parallel-size={{ int $tier.parallelism.data }}
{{- end }}
{{- if .part }}
- --distributed-executor-backend=ray
- {{ printf "--ray-address=%s:6379" (include "tandem.podHost" .root) | quote }}
{{- end }}
- --device={{ ternary "cuda" "cpu" $tier.gpu.enabled }}
- --drain-timeout-s={{ int $tier.drain.drainSeconds }}
{{- include "tandem.kvTierFlags" . }}
{{- include "tandem.adapterFlags" . }}
{{- include "tandem.crashReportFlags" . }}
{{- include "tandem.serviceFlags" (dict "root" .root "settings" $tier.settings) }}
{{- end -}}

{{/* Nodes that serve the API ask for the key. */}}
{{- define "tandem.hasNodeKey" -}}
{{- if and (ne .component "prefill") (ne .part "worker") -}}{{ include "tandem.nodeKeySecret" .root }}{{- end -}}
{{- end -}}

{{- define "tandem.tierEnv" -}}
{{- include "tandem.podIp" . }}
{{- include "tandem.tracesEnv" (dict "root" .root "name" "engine" "isOnHost" (include "tandem.isOnHost" .)) }}
{{- include "tandem.modelEnv" .root }}
{{- include "tandem.cacheEnv" .root }}
{{- include "tandem.ncclEnv" . }}
{{- if .part }}
{{ include "tandem.rayEnv" . }}
{{- end }}
{{- with .of.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.tierPorts" -}}
- name: grpc
  containerPort: {{ int .of.ports.grpc }}
{{- if ne .component "prefill" }}
- name: http
  containerPort: {{ int .of.ports.http }}
{{- end }}
- name: metrics
  containerPort: {{ int .of.ports.metrics }}
{{- if include "tandem.isOnHost" . }}
# On a host's network, the scheduler keeps pods apart by the ports that they name.
{{- if include "tandem.givesKv" . }}
- name: kv
  containerPort: {{ int .of.ports.kv }}
{{- end }}
{{- if .part }}
- name: ray
  containerPort: 6380
{{- end }}
{{- end }}
{{- end -}}

{{/* The port of metrics answers from the first second; while the model loads, /ready says how far it
  is. After that the health service says SERVING while the node serves: not while it drains, not with
  a dead or stuck engine. The kubelet cannot ask it over TLS; then it asks for the same on the port of
  metrics. So it does for nodes that change their role: one that drains on its way must not be
  restarted, which only that port tells apart. */}}
{{- define "tandem.tierProbes" -}}
{{- $probes := .of.probes -}}
{{- $started := dict "httpGet" (dict "path" "/ready" "port" "metrics") -}}
{{- $ready := dict "grpc" (dict "port" (int .of.ports.grpc)) -}}
{{- $alive := $ready -}}
{{- if or (include "tandem.hasTls" .root) (eq .component "node") -}}
{{- $ready = $started -}}
{{- $alive = dict "httpGet" (dict "path" "/health" "port" "metrics") -}}
{{- end -}}
startupProbe:
  {{- toYaml $started | nindent 2 }}
  periodSeconds: {{ int $probes.startup.periodSeconds }}
  timeoutSeconds: {{ int $probes.startup.timeoutSeconds }}
  failureThreshold: {{ div (add (int $probes.startup.budgetSeconds) (int $probes.startup.periodSeconds) -1) (int $probes.startup.periodSeconds) }}
readinessProbe:
  {{- toYaml $ready | nindent 2 }}
  {{- toYaml $probes.readiness | nindent 2 }}
livenessProbe:
  {{- toYaml $alive | nindent 2 }}
  {{- toYaml $probes.liveness | nindent 2 }}
{{- end -}}

{{- define "tandem.tierMounts" -}}
- name: models
  mountPath: /models
  {{- if include "tandem.modelIsReadOnly" .root }}
  readOnly: true
  {{- end }}
- name: shm
  mountPath: /dev/shm
{{ include "tandem.cacheMounts" .root }}
- name: tmp
  mountPath: /tmp
{{- if include "tandem.hasNodeKey" . }}
- name: node-key
  mountPath: /etc/tandem/node-key
  readOnly: true
{{- end }}
{{- include "tandem.securityMounts" . }}
{{- if .part }}
- name: ray-token
  mountPath: /etc/tandem/ray-token
  readOnly: true
{{- end }}
{{- include "tandem.fabricMounts" . }}
{{- include "tandem.kvTierMounts" . }}
{{- include "tandem.adapterMounts" . }}
{{- include "tandem.crashReportMounts" . }}
{{- with .of.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.tierVolumes" -}}
{{- include "tandem.modelVolume" .root }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .of.shm.sizeLimit | quote }}
{{ include "tandem.cacheVolumes" .root }}
- name: tmp
  emptyDir: {}
{{- if include "tandem.hasNodeKey" . }}
- name: node-key
  secret:
    secretName: {{ include "tandem.nodeKeySecret" .root | quote }}
    items: [{key: {{ .root.Values.auth.nodeKey.secretKey | quote }}, path: {{ .root.Values.auth.nodeKey.secretKey | quote }}}]
{{- end }}
{{- include "tandem.securityVolumes" . }}
{{- if .part }}
- name: ray-token
  secret:
    secretName: {{ include "tandem.rayTokenSecret" .root | quote }}
{{- end }}
{{- include "tandem.fabricVolumes" . }}
{{- include "tandem.kvTierVolumes" . }}
{{- include "tandem.adapterVolumes" . }}
{{- include "tandem.crashReportVolumes" . }}
{{- with .of.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
