{{/* Mistakes that the schema cannot see, because they are between values. Each message says what
  is wrong and what to set; all are told at once. */}}
{{- define "tandem.mistakes" -}}
{{- $found := dict "list" list -}}
{{- $tiers := dict -}}
{{- $models := dict -}}
{{- include "tandem.models" (dict "root" . "into" $models) -}}
{{- $roles := dict -}}
{{- range $model := $models.list -}}
{{- $of := dict -}}
{{- include "tandem.tiers" (dict "root" $model "into" $of) -}}
{{- range $name, $tier := $of -}}
{{- $_ := set $tiers (printf "%s%s" (include "tandem.modelPrefix" $model) $name) $tier -}}
{{- $_ := set $roles $name $tier -}}
{{- end -}}
{{- end -}}
{{- $scope := dict "root" . "tiers" $tiers "found" $found -}}
{{- $name := include "tandem.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "objects would be called %s-..., but Services need small letters, digits and dashes, and a letter first: set fullnameOverride" $name)) -}}
{{- end -}}
{{- if and (hasKey .Values "enabled") (not .Values.enabled) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "enabled is false, and the chart is rendered: only a parent chart reads it, by `condition`") -}}
{{- end -}}
{{- include "tandem.mistakes.models" $scope -}}
{{- include "tandem.mistakes.router" $scope -}}
{{- include "tandem.mistakes.labels" (dict "found" $found "name" "commonLabels" "labels" .Values.commonLabels) -}}
{{- include "tandem.mistakes.labels" (dict "found" $found "name" "jobs.podLabels" "labels" .Values.jobs.podLabels) -}}
{{- include "tandem.mistakes.security" (dict "root" . "tiers" $roles "found" $found) -}}
{{- include "tandem.mistakes.scheduling" $scope -}}
{{- include "tandem.mistakes.kvStore" $scope -}}
{{- include "tandem.mistakes.cache" $scope -}}
{{- include "tandem.mistakes.relabelings" $scope -}}
{{- range $model := $models.list -}}
{{- $own := dict "list" list -}}
{{- $of := dict -}}
{{- include "tandem.tiers" (dict "root" $model "into" $of) -}}
{{- $own_scope := dict "root" $model "tiers" $of "found" $own -}}
{{- include "tandem.mistakes.model" $own_scope -}}
{{- include "tandem.mistakes.preload" $own_scope -}}
{{- include "tandem.mistakes.calibration" $own_scope -}}
{{- include "tandem.mistakes.set" $own_scope -}}
{{- include "tandem.mistakes.ratio" $own_scope -}}
{{- include "tandem.mistakes.pool" $own_scope -}}
{{- include "tandem.mistakes.hostPorts" $own_scope -}}
{{- range $name, $tier := $of -}}
{{- include "tandem.mistakes.tier" (dict "root" $model "name" $name "tier" $tier "found" $own) -}}
{{- end -}}
{{- range $own.list -}}
{{- $text := printf "%s%s" (include "tandem.modelPrefix" $model) (trimPrefix "- " .) -}}
{{- include "tandem.mistake" (dict "found" $found "text" $text) -}}
{{- end -}}
{{- end -}}
{{- join "\n" $found.list -}}
{{- end -}}

{{/* What stands before the values of an entry of `models` in messages. */}}
{{- define "tandem.modelPrefix" -}}
{{- with get . "modelKey" -}}models ({{ . }}): {{ end -}}
{{- end -}}

{{- define "tandem.mistake" -}}
{{- $_ := set .found "list" (append .found.list (printf "- %s" .text)) -}}
{{- end -}}

{{/* Pods that may exist at once: what an autoscaler allows, else what is asked for. */}}
{{- define "tandem.maxPods" -}}
{{- if eq .autoscaling.kind "none" }}{{ int .replicas }}{{ else }}{{ int .autoscaling.maxReplicas }}{{ end -}}
{{- end -}}

{{- define "tandem.mistakes.model" -}}
{{- $found := .found -}}
{{- $model := .root.Values.model -}}
{{- $storage := $model.storage -}}
{{- if not (or $model.name (include "tandem.modelIsLocal" .root)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "model.name is empty: set it to a name on the hub (--set model.name=org/model), or model.storage.path to the checkpoint's folder in the volume") -}}
{{- end -}}
{{- if and $model.revision (include "tandem.modelIsLocal" .root) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "model.revision is of a model on the hub, but the checkpoint is in the volume: leave it empty") -}}
{{- end -}}
{{- if and (eq $storage.type "emptyDir") (or $storage.path $model.hub.offline) -}}
{{- $set := ternary "model.storage.path is set" "model.hub.offline is true" (not (empty $storage.path)) -}}
{{- $else := ternary "leave the path empty to download model.name" "set model.hub.offline to false" (not (empty $storage.path)) -}}
{{- range $name, $tier := .tiers -}}
{{- $fills := false -}}
{{- range $tier.initContainers -}}{{- range .volumeMounts -}}{{- if eq .name "models" -}}{{- $fills = true -}}{{- end -}}{{- end -}}{{- end -}}
{{- if not $fills -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s, but an emptyDir starts empty: let one of %s.initContainers mount the volume models and fill it, set model.storage.type to pvc, hostPath or image, or %s" $set $name $else)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq $storage.type "hostPath" -}}
{{- if not $storage.hostPath.path -}}
{{- include "tandem.mistake" (dict "found" $found "text" "model.storage.type is hostPath: set model.storage.hostPath.path to a folder of the nodes") -}}
{{- end -}}
{{- end -}}
{{- if eq $storage.type "image" -}}
{{- if not $storage.image.reference -}}
{{- include "tandem.mistake" (dict "found" $found "text" "model.storage.type is image: set model.storage.image.reference to an OCI artifact with the checkpoint") -}}
{{- end -}}
{{- if semverCompare "<1.31-0" .root.Capabilities.KubeVersion.Version -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "model.storage.type is image, which Kubernetes has since 1.31, and this is %s: use pvc or hostPath" .root.Capabilities.KubeVersion.Version)) -}}
{{- end -}}
{{- end -}}
{{- if eq $storage.type "pvc" -}}
{{- $pods := 0 -}}
{{- range $tier := .tiers -}}{{- $pods = add $pods (mul (include "tandem.maxPods" $tier | int) (int $tier.parallelism.hosts)) -}}{{- end -}}
{{- $modes := $storage.pvc.accessModes -}}
{{- if include "tandem.isPreloaded" .root -}}{{- $pods = add1 $pods -}}{{- end -}}
{{- $shared := or (has "ReadWriteMany" $modes) (has "ReadOnlyMany" $modes) -}}
{{- if not $shared -}}{{- if gt (int $pods) 1 -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%d pods share one claim, but model.storage.pvc.accessModes is %s: use ReadWriteMany, or model.storage.type emptyDir, hostPath or image" (int $pods) (join "," $modes))) -}}
{{- end -}}{{- end -}}
{{- if not (or $storage.path (include "tandem.cacheIsReadOnly" .root)) -}}{{- if not (or (has "ReadWriteMany" $modes) (has "ReadWriteOnce" $modes) (has "ReadWriteOncePod" $modes)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "nothing can be downloaded into a claim that is ReadOnlyMany: set model.storage.path to the checkpoint's folder in it, model.hub.offline to true if it holds a complete cache of the hub (its folder hub), or use ReadWriteMany") -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.mistakes.tier" -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $tier := .tier -}}
{{- include "tandem.mistakes.ports" . -}}
{{- range $side := list "limits" "requests" -}}
{{- if hasKey (get (default (dict) $tier.resources) $side | default dict) $tier.gpu.resourceName -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.resources.%s counts %s, which follows from %s.parallelism: remove it" $name $side $tier.gpu.resourceName $name)) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.mistakes.replacement" . -}}
{{- if $tier.topology.colocateRequired -}}{{- if not $tier.topology.colocateKey -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.topology.colocateRequired needs %s.topology.colocateKey, the label of a domain" $name $name)) -}}
{{- end -}}{{- end -}}
{{- if $tier.topology.colocateKey -}}{{- if $tier.affinity -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.affinity replaces what %s.topology.colocateKey would make: set one of them" $name $name)) -}}
{{- end -}}{{- end -}}
{{- include "tandem.mistakes.hosts" . -}}
{{- include "tandem.mistakes.node" . -}}
{{- include "tandem.mistakes.autoscaling" . -}}
{{- include "tandem.mistakes.fabric" . -}}
{{- include "tandem.mistakes.pod" (dict "found" $found "name" $name "of" $tier) -}}
{{- include "tandem.mistakes.kvTiers" (dict "found" $found "name" $name "of" $tier) -}}
{{- include "tandem.mistakes.adapters" (dict "root" .root "found" $found "name" $name "of" $tier) -}}
{{- $scope := dict "root" .root "component" $name "of" $tier "part" (ternary "leader" "" (gt (int $tier.parallelism.hosts) 1)) -}}
{{- include "tandem.mistakes.resources" (dict "found" $found "name" $name "resources" (include "tandem.tierResources" $scope | fromYaml)) -}}
{{- include "tandem.mistakes.twice" (dict "found" $found "name" $name "env" (include "tandem.tierEnv" $scope) "mounts" (include "tandem.tierMounts" $scope) "volumes" (include "tandem.tierVolumes" $scope)) -}}
{{- $flags := include "tandem.tierArgs" $scope -}}
{{- include "tandem.mistakes.extras" (dict "root" .root "found" $found "name" $name "of" $tier "own" "engine" "flags" $flags) -}}
{{- end -}}

{{- define "tandem.mistakes.hosts" -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $tensor := int .tier.parallelism.tensor -}}
{{- $stages := int .tier.parallelism.pipeline -}}
{{- $hosts := int .tier.parallelism.hosts -}}
{{- if and (gt $stages 1) (eq $name "decode") -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "decode.parallelism.pipeline (%d) is for prefill nodes: set it to 1, and prefill.parallelism.pipeline in place of tierDefaults" $stages)) -}}
{{- end -}}
{{- $groups := int .tier.parallelism.data -}}
{{- if and (gt $groups 1) (or (gt $hosts 1) (gt $stages 1)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.parallelism.data (%d) is for nodes on one host, without stages: set hosts and pipeline to 1" $name $groups)) -}}
{{- end -}}
{{- if gt $hosts 1 -}}
{{- if and (eq $stages 1) (mod $tensor $hosts) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.parallelism.tensor (%d) cannot be spread evenly over %d hosts: set it to a multiple" $name $tensor $hosts)) -}}
{{- else if mod (mul $tensor $stages) $hosts -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.parallelism: %d stages of %d ranks cannot be spread evenly over %d hosts: set pipeline to a multiple" $name $stages $tensor $hosts)) -}}
{{- end -}}
{{- $storage := .root.Values.model.storage -}}
{{- if eq $storage.type "emptyDir" -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s spans %d hosts, which must all read the checkpoint, but an emptyDir is one pod's: set model.storage.type to pvc, hostPath or image" $name $hosts)) -}}
{{- else if eq $storage.type "hostPath" -}}{{- if not $storage.path -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s spans %d hosts, and only the first would download: set model.storage.path to the checkpoint's folder, which every host must have" $name $hosts)) -}}
{{- end -}}{{- end -}}
{{- else if .tier.topology.groupKey -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.topology.groupKey is for nodes that span hosts: raise %s.parallelism.hosts, or use colocateKey" $name $name)) -}}
{{- end -}}
{{- end -}}

{{/* One host and several are workloads of two kinds: Helm deletes the one and makes the other, and
  no pod serves until the new ones have loaded. */}}
{{- define "tandem.mistakes.replacement" -}}
{{- $found := .found -}}
{{- $scope := dict "root" .root "component" .name "of" .tier -}}
{{- $name := include "tandem.name" $scope -}}
{{- $kinds := list
      (list "Deployment" "apps/v1" $name)
      (list "LeaderWorkerSet" "leaderworkerset.x-k8s.io/v1" $name)
      (list "DisaggregatedSet" "disaggregatedset.x-k8s.io/v1" (include "tandem.setName" $scope)) -}}
{{- $own := ternary "Deployment" "LeaderWorkerSet" (eq (int .tier.parallelism.hosts) 1) -}}
{{- if include "tandem.isRole" $scope -}}{{- $own = "DisaggregatedSet" -}}{{- end -}}
{{- if not .tier.parallelism.allowReplacement -}}
{{- range $one := $kinds -}}
{{- $kind := index $one 0 -}}
{{- $api := index $one 1 -}}
{{- if and (ne $kind $own) (or (eq $kind "Deployment") ($.root.Capabilities.APIVersions.Has $api)) -}}
{{- if lookup $api $kind $.root.Release.Namespace (index $one 2) -}}
{{- $value := ternary "disaggregatedSet.enabled" (printf "%s.parallelism.hosts" $.name) (or (eq $own "DisaggregatedSet") (eq $kind "DisaggregatedSet")) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s: the tier is a %s now, which would be deleted before the new pods serve: install the new layout as a second release and move traffic, or accept the outage with %s.parallelism.allowReplacement" $value $kind $.name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.mistakes.autoscaling" -}}
{{- range $key := list "serverAddress" "query" "threshold" "ignoreNullValues" -}}
{{- if hasKey $.root.Values.monitoring.prometheusTrigger.metadata $key -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "monitoring.prometheusTrigger.metadata has %s, which the chart sets: remove it" $key)) -}}
{{- end -}}
{{- end -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $scaling := .tier.autoscaling -}}
{{- if ne $scaling.kind "none" -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling: minReplicas (%d) is more than maxReplicas (%d)" $name (int $scaling.minReplicas) (int $scaling.maxReplicas))) -}}
{{- end -}}
{{- include "tandem.mistakes.slo" . -}}
{{- include "tandem.mistakes.sloBesideNodes" . -}}
{{- $seen := dict -}}
{{- range include "tandem.scalingMetrics" .tier | fromYamlArray -}}
{{- if hasKey $seen .metric -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling names the metric %s twice: leave it out of moreMetrics" $name .metric)) -}}
{{- end -}}
{{- $_ := set $seen .metric true -}}
{{- if not (or .target (has .metric (list "slo" "ratio"))) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling.moreMetrics: say the target of %s" $name .metric)) -}}
{{- else if eq .metric "kvUtilization" -}}{{- if gt (toString .target | float64) 1.0 -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling.target is %v, but kvUtilization is a part of 1: set for example 0.8" $name .target)) -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq $scaling.kind "keda" -}}{{- if not .root.Values.monitoring.prometheusUrl -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling.kind is keda: set monitoring.prometheusUrl, for example http://prometheus-operated.monitoring:9090" $name)) -}}
{{- end -}}{{- end -}}
{{- end -}}

{{/* What holds for the pods of each component: name, of */}}
{{- define "tandem.mistakes.pod" -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $surge := toString .of.strategy.maxSurge | trimSuffix "%" | int -}}
{{- $unavailable := toString .of.strategy.maxUnavailable | trimSuffix "%" | int -}}
{{- if and (eq $surge 0) (eq $unavailable 0) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.strategy: maxSurge and maxUnavailable are both 0, so no rollout can begin: set one of them to 1" $name)) -}}
{{- end -}}
{{- range .of.env -}}
{{- if hasPrefix "TANDEM_" .name -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.env sets %s: write it as a value below %s.settings, where it is checked" $name .name $name)) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.mistakes.labels" (dict "found" $found "name" (printf "%s.podLabels" $name) "labels" .of.podLabels) -}}
{{- end -}}

{{/* Labels that the chart sets itself: found, name (of the value), labels */}}
{{- define "tandem.mistakes.labels" -}}
{{- range $label, $_ := .labels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "helm.sh/" $label) (hasPrefix "llm-d.ai/" $label) -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s sets %s, which is the chart's own: choose another label" $.name $label)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.mistakes.router" -}}
{{- $found := .found -}}
{{- $router := .root.Values.router -}}
{{- $discovery := $router.discovery -}}
{{- if eq (int $router.ports.http) (int $router.ports.admin) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "router.ports.http and router.ports.admin are both %d: choose two" (int $router.ports.http))) -}}
{{- end -}}
{{- if eq $discovery.type "static" -}}
{{- if not $discovery.decode -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.discovery.type is static: list the decode nodes in router.discovery.decode, as host:http_port/grpc_port") -}}
{{- end -}}
{{- else if and (eq $discovery.type "kubernetes") (not .root.Values.rbac.create) (or .root.Values.serviceAccount.create (not .root.Values.serviceAccount.name)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "rbac.create is false, so routers may not watch EndpointSlices: set serviceAccount.create to false and serviceAccount.name to an account that may get, list and watch them, or router.discovery.type to dns") -}}
{{- else if or $discovery.prefill $discovery.decode -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "router.discovery lists nodes, which type %s does not read: set router.discovery.type to static" $discovery.type)) -}}
{{- end -}}
{{- if ne $router.autoscaling.kind "none" -}}{{- if gt (int $router.autoscaling.minReplicas) (int $router.autoscaling.maxReplicas) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.autoscaling: minReplicas is more than maxReplicas") -}}
{{- end -}}{{- end -}}
{{- /* A container with a limit alone asks for as much. */ -}}
{{- $resources := default dict $router.resources -}}
{{- if ne $router.autoscaling.kind "none" -}}{{- if not (or (default dict $resources.requests).cpu (default dict $resources.limits).cpu) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.autoscaling goes by a share of the CPUs that a router asks for, and it asks for none: set router.resources.requests.cpu") -}}
{{- end -}}{{- end -}}
{{- if $router.service.nodePort -}}{{- if eq $router.service.type "ClusterIP" -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.service.nodePort needs router.service.type NodePort or LoadBalancer") -}}
{{- end -}}{{- end -}}
{{- if or $router.service.loadBalancerClass $router.service.loadBalancerSourceRanges -}}{{- if ne $router.service.type "LoadBalancer" -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.service.loadBalancerClass and loadBalancerSourceRanges need router.service.type LoadBalancer") -}}
{{- end -}}{{- end -}}
{{- if $router.httpRoute.enabled -}}{{- if not $router.httpRoute.parentRefs -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.httpRoute.enabled needs router.httpRoute.parentRefs, the gateway to attach to") -}}
{{- end -}}{{- end -}}
{{- with $router.responseStore -}}
{{- if and .existingSecret .existingClaim -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.responseStore names a Secret and a claim: PostgreSQL or a SQLite file, so leave one out") -}}
{{- else if and .existingClaim (or (gt (int $router.replicas) 1) (ne $router.autoscaling.kind "none")) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.responseStore.existingClaim is a file for one router: set router.replicas to 1 and router.autoscaling.kind to none, or use PostgreSQL (existingSecret)") -}}
{{- end -}}
{{- end -}}
{{- with $router.batchStore -}}
{{- $isFile := or .existingClaim .size -}}
{{- if or (and .existingSecret $isFile) (and .existingClaim .size) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.batchStore names more than one of existingSecret (PostgreSQL), existingClaim and size (a SQLite file): leave one out") -}}
{{- else if and $isFile (or (gt (int $router.replicas) 1) (ne $router.autoscaling.kind "none")) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.batchStore.size and existingClaim are a file for one router: set router.replicas to 1 and router.autoscaling.kind to none, or use PostgreSQL (existingSecret)") -}}
{{- end -}}
{{- end -}}
{{- range $name, $tier := .tiers -}}
{{- $grace := include "tandem.graceSeconds" $tier.drain | int -}}
{{- if lt (include "tandem.graceSeconds" $router.drain | int) $grace -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "a router may drain for %s s, but %s pods for %d s, whose answers it would cut: raise router.drain.drainSeconds" (include "tandem.graceSeconds" $router.drain) $name $grace)) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.mistakes.pod" (dict "found" $found "name" "router" "of" $router) -}}
{{- include "tandem.mistakes.resources" (dict "found" $found "name" "router" "resources" (default dict $router.resources)) -}}
{{- $scope := dict "root" .root "component" "router" "of" $router "part" "" -}}
{{- include "tandem.mistakes.twice" (dict "found" $found "name" "router" "env" (include "tandem.routerEnv" $scope) "mounts" (include "tandem.routerMounts" $scope) "volumes" (include "tandem.routerVolumes" $scope)) -}}
{{- $flags := include "tandem.routerArgs" $scope -}}
{{- include "tandem.mistakes.extras" (dict "root" .root "found" $found "name" "router" "of" $router "own" "router" "flags" $flags) -}}
{{- end -}}

{{- define "tandem.mistakes.pool" -}}
{{- $found := .found -}}
{{- $pool := .root.Values.inferencePool -}}
{{- if $pool.enabled -}}
{{- if not $pool.endpointPicker.name -}}
{{- include "tandem.mistake" (dict "found" $found "text" "inferencePool.enabled needs inferencePool.endpointPicker.name, the Service of the endpoint picker") -}}
{{- end -}}
{{- if and .root.Values.auth.clusterToken.enabled (not $pool.gatewayShowsToken) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "inferencePool.enabled makes gateways reach decode nodes, which ask for the cluster token: have the gateway add the header x-tandem-cluster-token and set inferencePool.gatewayShowsToken, or set auth.clusterToken.enabled to false and let networkPolicy say who reaches the nodes") -}}
{{- end -}}
{{- if and (include "tandem.hasTls" .root) (not $pool.gatewayShowsCertificate) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "inferencePool.enabled makes gateways reach decode nodes, which ask for a certificate: have the gateway show one that names tandem-router and set inferencePool.gatewayShowsCertificate, or set tls.mode to none") -}}
{{- end -}}
{{- if and $pool.gatewayShowsToken (not .root.Values.auth.clusterToken.enabled) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "inferencePool.gatewayShowsToken is set, but auth.clusterToken.enabled is false: set one of them differently") -}}
{{- end -}}
{{- if .root.Values.auth.nodeKey.enabled -}}
{{- include "tandem.mistake" (dict "found" $found "text" "auth.nodeKey.enabled lets only the router reach decode nodes, and inferencePool.enabled makes gateways reach them: turn one off") -}}
{{- end -}}
{{- if hasKey .tiers "prefill" -}}
{{- if ne (int .tiers.prefill.ports.grpc) (int .tiers.decode.ports.http) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "an InferencePool has one port for all its pods: set prefill.ports.grpc to decode.ports.http (%d)" (int .tiers.decode.ports.http))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Scaling by objectives: found, root, name, tier */}}
{{- define "tandem.mistakes.slo" -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $scaling := .tier.autoscaling -}}
{{- $flag := ternary "sloTtftMs" "sloItlMs" (eq $name "prefill") -}}
{{- $counts := has "slo" (include "tandem.metricNames" .tier | splitList ",") -}}
{{- if $counts -}}{{- if not (index .root.Values.router.settings $flag) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling.metric is slo, but no router knows the objective: set router.settings.%s, in milliseconds" $name $flag)) -}}
{{- end -}}{{- end -}}
{{- if and $counts (ne $scaling.kind "none") .root.Values.models -}}
{{- $counted := include "tandem.countedName" .root -}}
{{- if not $counted -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling.metric is slo, but which of the models a router speaks of is known by name alone: set model.servedName" $name)) -}}
{{- else if and (eq $scaling.kind "hpa") (not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$" $counted)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling: an HPA selects the model by a label, which %s cannot be: set model.servedName, or kind to keda" $name $counted)) -}}
{{- end -}}
{{- end -}}
{{- if eq (int $scaling.minReplicas) 0 -}}
{{- if not (and $counts (eq (printf "%s %s" $name $scaling.kind) "prefill keda")) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.autoscaling.minReplicas is 0: only prefill can go to zero, with kind keda and metric slo, because only then something asks for the first pod" $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
