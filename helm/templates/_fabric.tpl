{{/* Networks besides the cluster's own, and the devices that reach them. */}}

{{/* With the host's network a pod has the host's names, unless it asks for the cluster's. */}}
{{- define "tandem.hostNetwork" -}}
{{- if (.of.network | default dict).hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end -}}

{{/* Empty unless the tier's pods are on the network of their hosts: of */}}
{{- define "tandem.isOnHost" -}}
{{- if (.of.network | default dict).hostNetwork }}true{{ end -}}
{{- end -}}

{{/* Where a prefill node's KV is fetched, and where a decode node fetches it from: component, of */}}
{{- define "tandem.kvHostFlags" -}}
{{- $host := .of.network.kvHost -}}
{{- if ne .component "decode" }}
- {{ printf "--kv-host=%s" (default "$(POD_IP)" $host) | quote }}
{{- else if $host }}
- {{ printf "--kv-host=%s" $host | quote }}
{{- end }}
{{- end -}}

{{/* Whether a node asks the pod's annotation for its address: of */}}
{{- define "tandem.asksMultus" -}}
{{- if contains "network:" .of.network.kvHost }}true{{ end -}}
{{- end -}}

{{- define "tandem.fabricMounts" -}}
{{- if include "tandem.asksMultus" . }}
- name: pod-info
  mountPath: /etc/tandem/pod
  readOnly: true
{{- end }}
{{- end -}}

{{- define "tandem.fabricVolumes" -}}
{{- if include "tandem.asksMultus" . }}
- name: pod-info
  downwardAPI:
    items:
      - path: network-status
        fieldRef: {fieldPath: "metadata.annotations['k8s.v1.cni.cncf.io/network-status']"}
{{- end }}
{{- end -}}

{{/* Annotations of a tier's pods: the user's, and those that networks and schedulers ask for. */}}
{{- define "tandem.tierAnnotations" -}}
{{- $found := deepCopy .of.podAnnotations -}}
{{- with .of.network.networks -}}
{{- $_ := set $found "k8s.v1.cni.cncf.io/networks" . -}}
{{- end -}}
{{- $_ := merge $found (include "tandem.schedulerPodAnnotations" . | fromYaml) -}}
{{- with $found }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What NCCL is told: of. Nothing here is left to chance where a wrong choice would be slow and not
  wrong: NCCL_NET makes it fail rather than fall back to TCP. */}}
{{- define "tandem.ncclEnv" -}}
{{- $nccl := .of.nccl -}}
{{- $found := dict -}}
{{- if eq $nccl.preset "tcp" -}}
{{- $_ := set $found "NCCL_NET" "Socket" -}}
{{- $_ := set $found "NCCL_IB_DISABLE" "1" -}}
{{- else if has $nccl.preset (list "infiniband" "roce") -}}
{{- $_ := set $found "NCCL_NET" "IB" -}}
{{- $_ := set $found "NCCL_IB_DISABLE" "0" -}}
{{- end -}}
{{- if eq $nccl.preset "roce" -}}
{{- $_ := set $found "NCCL_IB_ROCE_VERSION_NUM" "2" -}}
{{- end -}}
{{- if $nccl.interface -}}{{- $_ := set $found "NCCL_SOCKET_IFNAME" $nccl.interface -}}{{- end -}}
{{- if $nccl.hca -}}{{- $_ := set $found "NCCL_IB_HCA" $nccl.hca -}}{{- end -}}
{{- if not (kindIs "invalid" $nccl.gidIndex) -}}{{- $_ := set $found "NCCL_IB_GID_INDEX" (int $nccl.gidIndex | toString) -}}{{- end -}}
{{- if not (kindIs "invalid" $nccl.trafficClass) -}}{{- $_ := set $found "NCCL_IB_TC" (int $nccl.trafficClass | toString) -}}{{- end -}}
{{- range $name, $value := $found }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* The user's security context, and the right to lock memory for RDMA. */}}
{{- define "tandem.tierSecurityContext" -}}
{{- $context := deepCopy .of.securityContext -}}
{{- if .of.network.ipcLock -}}
{{- $capabilities := $context.capabilities | default dict -}}
{{- $_ := set $capabilities "add" (append ($capabilities.add | default list) "IPC_LOCK" | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Whether GPUs come by Dynamic Resource Allocation: of */}}
{{- define "tandem.claimsGpus" -}}
{{- if .of.gpu -}}{{- if and .of.gpu.enabled (eq .of.gpu.source "claim") }}true{{ end -}}{{- end -}}
{{- end -}}

{{/* Of a pod: root, component, of */}}
{{- define "tandem.resourceClaims" -}}
{{- $claims := .of.resourceClaims | default list -}}
{{- if include "tandem.claimsGpus" . -}}
{{- $claims = prepend $claims (dict "name" "gpus" "resourceClaimTemplateName" (include "tandem.name" .)) -}}
{{- end -}}
{{- with $claims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
