{{/* Mistakes about what is added to pods, their networks and devices, and who schedules them. */}}

{{/* What a feature of Kubernetes needs, unless it is newer than `since`: root, found, name (of the
  value), since, instead */}}
{{- define "tandem.mistakes.since" -}}
{{- $version := .root.Capabilities.KubeVersion.Version -}}
{{- if semverCompare (printf "<%s-0" .since) $version -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "%s needs Kubernetes %s, and this is %s: %s" .name .since $version .instead)) -}}
{{- end -}}
{{- end -}}

{{/* root, found, name, of, own (name of our container), flags (those that the chart sets, as lines) */}}
{{- define "tandem.mistakes.extras" -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $taken := dict .own true -}}
{{- range $value := list "initContainers" "sidecars" "extraContainers" -}}
{{- range get $.of $value -}}
{{- if hasKey $taken .name -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.%s has a container called %s, and the pod has one already: choose another name" $name $value .name)) -}}
{{- end -}}
{{- $_ := set $taken .name true -}}
{{- end -}}
{{- end -}}
{{- if .of.sidecars -}}
{{- include "tandem.mistakes.since" (merge (dict "name" (printf "%s.sidecars" $name) "since" "1.29" "instead" "use extraContainers") .) -}}
{{- end -}}
{{- $set := dict -}}
{{- range splitList "\n" .flags -}}
{{- if contains "--" . -}}
{{- $_ := set $set (include "tandem.flagName" .) true -}}
{{- end -}}
{{- end -}}
{{- range .of.extraArgs -}}
{{- $flag := include "tandem.flagName" . -}}
{{- if hasKey $set $flag -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.extraArgs gives --%s, which the chart sets: remove it, and write the value that the chart has for it" $name $flag)) -}}
{{- end -}}
{{- $_ := set $set $flag true -}}
{{- end -}}
{{- $image := ternary "router" "engine" (eq $name "router") -}}
{{- include "tandem.mistakes.flags" (dict "root" .root "found" $found "name" $name "args" .of.extraArgs "program" $name "image" $image) -}}
{{- end -}}

{{/* Flags that a program does not take, which its pod would end with: root, found, name (of the values),
  args, program, image. An image of another version than the chart's may have others. */}}
{{- define "tandem.mistakes.flags" -}}
{{- $version := .root.Chart.AppVersion -}}
{{- $from := get .root.Values.image .image -}}
{{- $tag := default (ternary "" $version (not (empty $from.digest))) $from.tag -}}
{{- if and .args (eq $tag $version) -}}
{{- $known := get (.root.Files.Get "files/flags.json" | fromJson) .program -}}
{{- range .args -}}{{- if hasPrefix "-" . -}}
{{- $flag := splitList "=" . | first -}}
{{- if has $flag $known.switches -}}
{{- if contains "=" . -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s.extraArgs gives %s, which takes no value: write %s, or --no-... to turn it off" $.name . $flag)) -}}
{{- end -}}
{{- else if has $flag $known.values -}}
{{- if not (or (contains "=" .) (eq $.program "bench")) -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s.extraArgs gives %s without a value: write %s=..." $.name $flag $flag)) -}}
{{- end -}}
{{- else -}}
{{- $near := list -}}
{{- $begin := regexReplaceAll "[^-]*$" $flag "" -}}
{{- range concat $known.values $known.switches -}}
{{- if and (ne $begin "--") (hasPrefix $begin .) -}}{{- $near = append $near . -}}{{- end -}}
{{- end -}}
{{- $hint := ternary (printf ", but %s" (join ", " $near)) "" (not (empty $near)) -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s.extraArgs gives %s, which tandem %s %s does not have%s: correct it, or name another version in image.%s.tag" $.name $flag $.program $version $hint $.image)) -}}
{{- end -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Helm 4 lets the API server refuse what is listed twice: name, found, env, mounts, volumes (as the
  chart and the values make them together) */}}
{{- define "tandem.mistakes.twice" -}}
{{- range $list := list (list "env" "name" .env) (list "extraVolumeMounts" "mountPath" .mounts) (list "extraVolumes" "name" .volumes) -}}
{{- $key := index $list 1 -}}
{{- $taken := dict -}}
{{- range fromYamlArray (index $list 2) -}}
{{- $one := get . $key -}}
{{- if hasKey $taken $one -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s.%s has %s, which the pod has already: remove it, or choose another %s" $.name (first $list) $one $key)) -}}
{{- end -}}
{{- $_ := set $taken $one true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A flag without its value, and without the no of what is turned off. */}}
{{- define "tandem.flagName" -}}
{{- regexReplaceAll "^[- \"]*(no-)?([-a-z0-9]*).*$" . "${2}" -}}
{{- end -}}

{{/* root, found, name, tier */}}
{{- define "tandem.mistakes.fabric" -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $tier := .tier -}}
{{- $network := $tier.network -}}
{{- $scope := dict "root" .root "component" $name "of" $tier -}}
{{- if include "tandem.asksMultus" $scope -}}
{{- if $network.hostNetwork -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.network.kvHost names a network of Multus, which attaches none to pods on the host's network: name an interface (interface:NAME), or set %s.network.hostNetwork to false" $name $name)) -}}
{{- else if not (or $network.networks (hasKey $tier.podAnnotations "k8s.v1.cni.cncf.io/networks")) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.network.kvHost names a network of Multus, and nothing attaches the pods to one: set %s.network.networks" $name $name)) -}}
{{- end -}}
{{- end -}}
{{- if and $network.networks (hasKey $tier.podAnnotations "k8s.v1.cni.cncf.io/networks") -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.podAnnotations sets k8s.v1.cni.cncf.io/networks, and so does %s.network.networks: keep one of them" $name $name)) -}}
{{- end -}}
{{- range $resource, $_ := $network.rdma -}}
{{- range $side := list "limits" "requests" -}}
{{- if hasKey (get ($tier.resources | default dict) $side | default dict) $resource -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.resources.%s counts %s, and so does %s.network.rdma: remove it" $name $side $resource $name)) -}}
{{- end -}}
{{- end -}}
{{- if eq $resource $tier.gpu.resourceName -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.network.rdma counts %s, which are the GPUs: name the devices of the network" $name $resource)) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.mistakes.nccl" . -}}
{{- $claimed := dict -}}
{{- range $tier.resourceClaims -}}
{{- if or (hasKey $claimed .name) (eq .name "gpus") -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.resourceClaims has %s, which is taken: choose another name" $name .name)) -}}
{{- end -}}
{{- $_ := set $claimed .name true -}}
{{- end -}}
{{- if include "tandem.claimsGpus" $scope -}}
{{- include "tandem.mistakes.since" (merge (dict "name" (printf "%s.gpu.source claim" $name) "since" "1.34" "instead" "use the device plugin (plugin)") .) -}}
{{- else if $tier.resourceClaims -}}
{{- include "tandem.mistakes.since" (merge (dict "name" (printf "%s.resourceClaims" $name) "since" "1.34" "instead" "use extended resources") .) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.mistakes.nccl" -}}
{{- $found := .found -}}
{{- $name := .name -}}
{{- $tier := .tier -}}
{{- $nccl := $tier.nccl -}}
{{- if has $nccl.preset (list "infiniband" "roce") -}}
{{- if not (or $tier.network.rdma $tier.resourceClaims $tier.securityContext.privileged) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.nccl.preset is %s, but the pods have no devices for RDMA: set %s.network.rdma to the resource of your device plugin, or %s.resourceClaims" $name $nccl.preset $name $name)) -}}
{{- end -}}
{{- else if or $nccl.hca (not (kindIs "invalid" $nccl.gidIndex)) (not (kindIs "invalid" $nccl.trafficClass)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.nccl.hca, gidIndex and trafficClass are of RDMA: set %s.nccl.preset to infiniband or roce" $name $name)) -}}
{{- end -}}
{{- end -}}

{{/* Pods on the network of their hosts share its ports: root, tiers, found */}}
{{- define "tandem.mistakes.hostPorts" -}}
{{- $found := .found -}}
{{- $tiers := .tiers -}}
{{- range $pair := list (list "prefill" "decode") (list "prefill" "node") (list "decode" "node") -}}
{{- $one := first $pair -}}
{{- $other := last $pair -}}
{{- $ours := get $tiers $one -}}
{{- $theirs := get $tiers $other -}}
{{- if and $ours $theirs -}}{{- if and $ours.network.hostNetwork $theirs.network.hostNetwork -}}
{{- range $port, $number := omit $ours.ports "kv" -}}
{{- range $second, $taken := $theirs.ports -}}
{{- if eq (int $number) (int $taken) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.ports.%s and %s.ports.%s are both %d, so with network.hostNetwork no host could run a pod of each: choose two" $one $port $other $second (int $number))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "tandem.mistakes.hostKvPorts" (dict "found" $found "name" $one "of" $ours "other" $other "tier" $theirs) -}}
{{- include "tandem.mistakes.hostKvPorts" (dict "found" $found "name" $other "of" $theirs "other" $one "tier" $ours) -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* found, name and of (whose KV is fetched), other and tier (who is on the same hosts) */}}
{{- define "tandem.mistakes.hostKvPorts" -}}
{{- if include "tandem.givesKv" (dict "component" .name "of" .of) -}}
{{- $first := int .of.ports.kv -}}
{{- $last := include "tandem.lastKvPort" .of | int -}}
{{- range $port, $taken := .tier.ports -}}
{{- if and (ge (int $taken) $first) (le (int $taken) $last) -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s.ports.%s (%d) is one of the ports %d to %d, which KV transfer of %s takes on the same hosts: choose another" $.other $port (int $taken) $first $last $.name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.mistakes.scheduling" -}}
{{- $found := .found -}}
{{- $scheduling := .root.Values.scheduling -}}
{{- $pods := 0 -}}
{{- range $name, $tier := .tiers -}}
{{- if eq (int $tier.parallelism.hosts) 1 -}}{{- $pods = add $pods (include "tandem.minPods" $tier | int) -}}{{- end -}}
{{- if and (has $scheduling.kind (list "volcano" "kubernetes")) $tier.schedulerName (ne $tier.schedulerName $scheduling.kind) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%s.schedulerName is %s, but scheduling.kind is %s: leave it empty" $name $tier.schedulerName $scheduling.kind)) -}}
{{- end -}}
{{- end -}}
{{- if eq $scheduling.kind "kueue" -}}
{{- if not $scheduling.queue -}}
{{- include "tandem.mistake" (dict "found" $found "text" "scheduling.kind is kueue: set scheduling.queue to a LocalQueue of the namespace") -}}
{{- end -}}
{{- else if and (eq $scheduling.kind "none") (or $scheduling.queue $scheduling.priorityClass) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "scheduling.queue and priorityClass are for a queue, but scheduling.kind is none: set it to kueue or volcano") -}}
{{- else if eq $scheduling.kind "kubernetes" -}}
{{- if semverCompare "<1.37-0" .root.Capabilities.KubeVersion.Version -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "scheduling.kind is kubernetes, whose gangs there are since 1.37, and this is %s: use volcano or kueue" .root.Capabilities.KubeVersion.Version)) -}}
{{- end -}}
{{- if $scheduling.queue -}}
{{- include "tandem.mistake" (dict "found" $found "text" "scheduling.queue is set, but Kubernetes' own scheduler has no queues: leave it empty, or set scheduling.kind to kueue or volcano") -}}
{{- end -}}
{{- if not $scheduling.minMember -}}
{{- include "tandem.mistake" (dict "found" $found "text" "scheduling.kind is kubernetes: set scheduling.minMember to the pods that are placed together") -}}
{{- end -}}
{{- end -}}
{{- if $scheduling.minMember -}}
{{- if not (has $scheduling.kind (list "volcano" "kubernetes")) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "scheduling.minMember is of gangs: set scheduling.kind to volcano or kubernetes") -}}
{{- else if gt (int $scheduling.minMember) (int $pods) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "scheduling.minMember (%d) is more than the %d pods of tiers of one host, so none would ever be placed: lower it, or raise the replicas (groups of several hosts are gangs of their own)" (int $scheduling.minMember) (int $pods))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Pods that there are at least. */}}
{{- define "tandem.minPods" -}}
{{- if eq .autoscaling.kind "none" }}{{ int .replicas }}{{ else }}{{ int .autoscaling.minReplicas }}{{ end -}}
{{- end -}}

{{- define "tandem.mistakes.cache" -}}
{{- $found := .found -}}
{{- $cache := .root.Values.compileCache -}}
{{- if and (eq $cache.type "hostPath") (not $cache.hostPath.path) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "compileCache.type is hostPath: set compileCache.hostPath.path to a folder of the nodes") -}}
{{- end -}}
{{- if eq $cache.type "pvc" -}}
{{- $pods := 0 -}}
{{- range .tiers -}}{{- $pods = add $pods (mul (include "tandem.maxPods" . | int) (int .parallelism.hosts)) -}}{{- end -}}
{{- if and (gt (int $pods) 1) (not (has "ReadWriteMany" $cache.pvc.accessModes)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "%d pods write to one claim, but compileCache.pvc.accessModes is %s: use ReadWriteMany, or compileCache.type hostPath or emptyDir" (int $pods) (join "," $cache.pvc.accessModes))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.mistakes.preload" -}}
{{- $found := .found -}}
{{- $model := .root.Values.model -}}
{{- $kind := $model.preload.kind -}}
{{- if ne $kind "none" -}}
{{- if include "tandem.modelIsLocal" .root -}}
{{- include "tandem.mistake" (dict "found" $found "text" "model.preload downloads model.name, but the checkpoint is in the volume already: set model.preload.kind to none") -}}
{{- else if ne $model.storage.type "pvc" -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "model.preload fills one volume for all pods, but model.storage.type is %s: set it to pvc" $model.storage.type)) -}}
{{- else if and (eq $kind "hook") (not $model.storage.pvc.existingClaim) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "model.preload.kind is hook, which runs before the chart makes its claim: set model.storage.pvc.existingClaim, or model.preload.kind to job") -}}
{{- end -}}
{{- if $model.hub.offline -}}
{{- include "tandem.mistake" (dict "found" $found "text" "model.preload downloads, and model.hub.offline forbids it: set one of them (pods that are preloaded never ask the hub)") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Rules, alerts and scalers find series by labels that the chart gives. */}}
{{- define "tandem.mistakes.relabelings" -}}
{{- range $value := list "relabelings" "metricRelabelings" -}}
{{- range get $.root.Values.monitoring.podMonitor $value -}}
{{- if has (.targetLabel | default "") (list "release" "component" "namespace") -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "monitoring.podMonitor.%s writes the label %s, by which alerts and scalers find a tier: choose another" $value .targetLabel)) -}}
{{- end -}}
{{- $rule := . -}}
{{- if has .action (list "labeldrop" "labelkeep") -}}
{{- range list "release" "component" "namespace" -}}
{{- if eq (regexMatch (printf "^(%s)$" (default "" $rule.regex)) .) (eq $rule.action "labeldrop") -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "monitoring.podMonitor.%s loses the label %s by a %s, and alerts and scalers find a tier by it: change its regex" $value . $rule.action)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
