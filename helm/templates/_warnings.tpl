{{/* What works, but an operator should know. */}}
{{- define "tandem.warnings" -}}
{{- $found := dict "list" list -}}
{{- $scopes := dict -}}
{{- include "tandem.tierScopes" (dict "root" . "into" $scopes) -}}
{{- if not (include "tandem.apiKeySecret" .) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "no request needs an API key: set auth.apiKeys.existingSecret") -}}
{{- end -}}
{{- if not (include "tandem.hasTls" .) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "prompts and KV go through the network in the clear: set tls.mode, unless a mesh encrypts them") -}}
{{- if not .Values.auth.clusterToken.enabled -}}
{{- include "tandem.mistake" (dict "found" $found "text" "services trust whoever reaches them: set auth.clusterToken.enabled or tls.mode, unless networkPolicy is enforced") -}}
{{- end -}}
{{- end -}}
{{- if .Values.tls.acceptMissing -}}
{{- include "tandem.mistake" (dict "found" $found "text" "tls.acceptMissing: who can change traffic can make services talk in plaintext; when nothing connects without TLS any more, upgrade with it set to false") -}}
{{- end -}}
{{- if not .Values.networkPolicy.enabled -}}
{{- include "tandem.mistake" (dict "found" $found "text" "networkPolicy.enabled is false: every pod of the cluster can reach the tiers") -}}
{{- end -}}
{{- if and .Values.router.https.enabled (or .Values.router.ingress.enabled .Values.router.httpRoute.enabled) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.https.enabled: your ingress or gateway must be told that its backend speaks HTTPS (an annotation, or a BackendTLSPolicy)") -}}
{{- end -}}
{{- range $scope := $scopes.list -}}
{{- $name := printf "%s%s" (include "tandem.modelPrefix" $scope.root) $scope.component -}}
{{- $tier := $scope.of -}}
{{- if and (eq $tier.autoscaling.kind "none") (eq (int $tier.replicas) 1) (ne $scope.component "node") -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s has one pod: %s" $name (ternary "while it is upgraded, decode nodes compute prompts themselves" "an upgrade is an outage" (eq $scope.component "prefill")))) -}}
{{- end -}}
{{- if and (eq $scope.component "decode") (eq $tier.autoscaling.kind "none") (eq (int $tier.replicas) 0) (not (int $scope.root.Values.node.replicas)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s has no pods, so that nothing answers: raise its replicas" $name)) -}}
{{- end -}}
{{- if $tier.network.hostNetwork -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s is on the network of its hosts, which network policies do not cover: whoever reaches the hosts reaches it, and the token or TLS alone keeps them out" $name)) -}}
{{- end -}}
{{- if and $tier.network.ipcLock (not (eq (toString $tier.podSecurityContext.runAsUser) "0")) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.network.ipcLock: Kubernetes gives added capabilities to root alone; unless the container runtime allows locked memory (memlock), registering memory for RDMA fails" $name)) -}}
{{- end -}}
{{- if and (eq $tier.autoscaling.kind "hpa") (not $.Values.monitoring.adapterRules.enabled) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s scales by custom metrics, which an adapter serves: give it the rules that monitoring.adapterRules.enabled makes, or its HorizontalPodAutoscaler does nothing" $name)) -}}
{{- end -}}
{{- if and (ne $tier.autoscaling.kind "none") (not $.Values.monitoring.podMonitor.enabled) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s scales by metrics, but monitoring.podMonitor.enabled is false: make sure that they are scraped with the labels namespace, release and component" $name)) -}}
{{- end -}}
{{- end -}}
{{- $models := dict -}}
{{- include "tandem.models" (dict "root" . "into" $models) -}}
{{- range $model := $models.list -}}
{{- $storage := $model.Values.model.storage -}}
{{- $prefix := include "tandem.modelPrefix" $model -}}
{{- if and (eq $storage.type "emptyDir") (not $storage.path) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%severy pod downloads the model for itself (model.storage.type emptyDir): a pvc makes restarts faster" $prefix)) -}}
{{- if not $storage.emptyDir.sizeLimit -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%shosts that run out of room evict pods: set model.storage.emptyDir.sizeLimit to the model's size, which is then asked for as ephemeral-storage" $prefix)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $value, $apis := include "tandem.neededApis" . | fromYaml -}}
{{- $isServed := false -}}
{{- range splitList " or " $apis -}}{{- if $.Capabilities.APIVersions.Has . -}}{{- $isServed = true -}}{{- end -}}{{- end -}}
{{- if not $isServed -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s needs %s, which this cluster does not serve: install its operator" $value $apis)) -}}
{{- end -}}
{{- end -}}
{{- with $found.list }}

Please note:
{{ join "\n" . }}
{{- end -}}
{{- end -}}

{{/* Value that was turned on to the API that it needs beyond Kubernetes, or to several of which one does. */}}
{{- define "tandem.neededApis" -}}
{{- $scopes := dict -}}
{{- include "tandem.tierScopes" (dict "root" . "into" $scopes) -}}
{{- range $scope := $scopes.list -}}
{{- $name := printf "%s%s" (include "tandem.modelPrefix" $scope.root) $scope.component -}}
{{- $tier := $scope.of -}}
{{- if gt (int $tier.parallelism.hosts) 1 }}
{{ quote (printf "%s.parallelism.hosts" $name) }}: leaderworkerset.x-k8s.io/v1
{{- end -}}
{{- if eq $tier.autoscaling.kind "keda" }}
{{ quote (printf "%s.autoscaling.kind" $name) }}: keda.sh/v1alpha1
{{- end -}}
{{- end -}}
{{- if .Values.monitoring.podMonitor.enabled }}
monitoring.podMonitor: monitoring.coreos.com/v1
{{- end -}}
{{- if .Values.monitoring.prometheusRule.enabled }}
monitoring.prometheusRule: monitoring.coreos.com/v1
{{- end -}}
{{- if .Values.router.httpRoute.enabled }}
router.httpRoute: gateway.networking.k8s.io/v1
{{- end -}}
{{- if .Values.disaggregatedSet.enabled }}
disaggregatedSet: disaggregatedset.x-k8s.io/v1
{{- end -}}
{{- if eq .Values.scheduling.kind "kueue" }}
scheduling.kind kueue: kueue.x-k8s.io/v1beta2 or kueue.x-k8s.io/v1beta1
{{- end -}}
{{- if eq .Values.scheduling.kind "volcano" }}
scheduling.kind volcano: scheduling.volcano.sh/v1beta1
{{- end -}}
{{- if eq .Values.scheduling.kind "kubernetes" }}
scheduling.kind kubernetes: scheduling.k8s.io/v1beta1
{{- end -}}
{{- if eq .Values.tls.mode "certManager" }}
tls.mode: cert-manager.io/v1
{{- end -}}
{{- if .Values.inferencePool.enabled }}
inferencePool: inference.networking.k8s.io/v1
{{- end -}}
{{- end -}}
