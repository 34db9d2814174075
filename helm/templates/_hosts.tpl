{{/* Nodes that span hosts: a Ray cluster of one group of pods.

  1. every pod starts Ray; workers wait until the leader's answers
  2. the leader becomes the service, which places its ranks on the cluster
  3. the leader ends: its Ray ends with the container, and the workers' with it
  When a group goes, all its pods are told at once: workers stay until the leader has drained. */}}

{{- define "tandem.tierCommand" -}}
{{- if eq .part "leader" }}
- sh
- -c
- ray start {{ include "tandem.rayFlags" . }} --head --port=6379 --include-dashboard=false --disable-usage-stats && exec "$0" "$@"
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
  getent ahosts "$LWS_LEADER_ADDRESS" | head -n 1 | cut -d ' ' -f 1 > /tmp/leader
  exec ray start {{ include "tandem.rayFlags" . }} --address="$(cat /tmp/leader):6379" --block
{{- else }}
- tandem
- {{ .component }}
{{- end }}
{{- end -}}

{{/* Ray carries nothing but the start of processes: its object store has the least it may. */}}
{{- define "tandem.rayFlags" -}}
{{- $ranks := div (int .of.parallelism.tensor) (int .of.parallelism.hosts) -}}
--node-ip-address="$POD_IP" --node-manager-port=6380 --object-store-memory=80000000 {{ if .of.gpu.enabled }}--num-gpus={{ $ranks }}{{ else }}--num-cpus={{ $ranks }}{{ end }}
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
{{- with .topology.groupKey }}
leaderworkerset.sigs.k8s.io/exclusive-topology: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* What an autoscaler changes: root, component, of */}}
{{- define "tandem.scaleTarget" -}}
{{- if eq (int .of.parallelism.hosts) 1 -}}
apiVersion: apps/v1
kind: Deployment
{{- else -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- end }}
name: {{ include "tandem.name" . | quote }}
{{- end -}}
