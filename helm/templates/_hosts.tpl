{{/* Nodes that span hosts: a Ray cluster of one group of pods.

  1. every pod starts Ray; workers wait until the leader's answers
  2. the leader becomes the service, which places its ranks on the cluster
  3. the leader ends: its Ray ends with the container, and the workers' with it
  When a group goes, all its pods are told at once: workers stay until the leader has drained. */}}

{{- define "tandem.tierCommand" -}}
{{- $names := ternary "ahostsv6" "ahostsv4" (eq .root.Values.ipFamily "IPv6") -}}
{{- if eq .part "leader" }}
- sh
- -c
- ray start {{ include "tandem.rayFlags" . }} --head --port=6379 --ray-client-server-port=10001 --include-dashboard=false && exec "$0" "$@"
- tandem
- {{ .component }}
{{- else if eq .part "worker" }}
- sh
- -c
- |
  tries=0
  until ray health-check --address "$LWS_LEADER_ADDRESS:6379"; do
    tries=$((tries + 1))
    if [ "$tries" -ge {{ div (int .of.probes.startup.budgetSeconds) 2 }} ]; then
      echo "no Ray at the leader $LWS_LEADER_ADDRESS:6379; look at its log" >&2
      exit 1
    fi
    sleep 2
  done
  leader=$(getent {{ $names }} "$LWS_LEADER_ADDRESS" | head -n 1 | cut -d ' ' -f 1)
  echo {{ ternary "\"[$leader]\"" "\"$leader\"" (eq .root.Values.ipFamily "IPv6") }} > /tmp/leader
  exec ray start {{ include "tandem.rayFlags" . }} --address="$(cat /tmp/leader):6379" --block
{{- else }}
- tandem
- {{ .component }}
{{- end }}
{{- end -}}

{{/* Ray carries nothing but the start of processes: its object store has the least it may. All
  ports are fixed, so that policies can be written. */}}
{{- define "tandem.rayFlags" -}}
{{- $ranks := include "tandem.podRanks" .of | int -}}
--node-ip-address="$POD_IP" {{ if .of.gpu.enabled }}--num-gpus={{ $ranks }} --num-cpus=1{{ else }}--num-cpus={{ $ranks }}{{ end }} --object-store-memory=104857600 --node-manager-port=6380 --object-manager-port=6381 --runtime-env-agent-port=6382 --dashboard-agent-grpc-port=6383 --dashboard-agent-listen-port=6384 --metrics-export-port=6385 --min-worker-port=10002 --max-worker-port=10199 --disable-usage-stats
{{- end -}}

{{/* Who has no token runs nothing. Ray must not end our workers because the weights' page cache
  fills the host's memory. */}}
{{- define "tandem.rayEnv" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN_PATH
  value: {{ printf "/etc/tandem/ray-token/%s" .root.Values.auth.rayToken.secretKey | quote }}
- name: RAY_memory_monitor_refresh_ms
  value: "0"
- name: RAY_DEDUP_LOGS
  value: "0"
{{- end -}}

{{- define "tandem.rayWorkerLife" -}}
ports:
  - name: ray
    containerPort: 6380
startupProbe:
  tcpSocket: {port: ray}
  periodSeconds: {{ int .of.probes.startup.periodSeconds }}
  failureThreshold: {{ div (add (int .of.probes.startup.budgetSeconds) (int .of.probes.startup.periodSeconds) -1) (int .of.probes.startup.periodSeconds) }}
readinessProbe:
  tcpSocket: {port: ray}
  {{- toYaml .of.probes.readiness | nindent 2 }}
lifecycle:
  preStop:
    exec:
      command: [sh, -c, 'while ray health-check --address "$(cat /tmp/leader):6379"; do sleep 2; done']
{{- end -}}

{{/* Labels of the pods that answer: of a group, the leader. root, component, of */}}
{{- define "tandem.servingLabels" -}}
{{ include "tandem.selectorLabels" . }}
{{- if ne .component "router" }}
{{- if gt (int .of.parallelism.hosts) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.groupAnnotations" -}}
{{- with .of.topology.groupKey }}
leaderworkerset.sigs.k8s.io/exclusive-topology: {{ . | quote }}
{{- end }}
{{- include "tandem.queueAnnotations" . }}
{{- end -}}

{{/* What an autoscaler changes: root, component, of */}}
{{- define "tandem.scaleTarget" -}}
{{- if include "tandem.isRole" . -}}
apiVersion: disaggregatedset.x-k8s.io/v1
kind: DisaggregatedSetRoleScaler
{{- else if or (eq .component "router") (eq (int (.of.parallelism | default dict).hosts) 1) -}}
apiVersion: apps/v1
kind: Deployment
{{- else -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- end }}
{{- if include "tandem.isRole" . }}
name: {{ printf "%s-%s" (include "tandem.setName" .) .component | quote }}
{{- else }}
name: {{ include "tandem.name" . | quote }}
{{- end }}
{{- end -}}
