{{/* Mistakes about ports and about how services make sure of each other. */}}
{{- define "tandem.mistakes.ports" -}}
{{- $name := .name -}}
{{- $taken := dict -}}
{{- range $port, $number := omit .tier.ports "kv" -}}
{{- $key := int $number | toString -}}
{{- if hasKey $taken $key -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s.ports.%s and %s.ports.%s are both %s: choose two" $name (get $taken $key) $name $port $key)) -}}
{{- end -}}
{{- $_ := set $taken $key $port -}}
{{- end -}}
{{- if include "tandem.givesKv" (dict "component" $name "of" .tier) -}}
{{- $first := int .tier.ports.kv -}}
{{- $last := include "tandem.lastKvPort" .tier | int -}}
{{- range $number, $port := $taken -}}
{{- if and (ge (int $number) $first) (le (int $number) $last) -}}
{{- include "tandem.mistake" (dict "found" $.found "text" (printf "%s.ports.%s (%s) is one of the ports %d to %d, which KV transfer takes from %s.ports.kv on, one for each rank and process: choose another" $name $port $number $first $last $name)) -}}
{{- end -}}
{{- end -}}
{{- if gt $last 65535 -}}
{{- include "tandem.mistake" (dict "found" .found "text" (printf "%s.ports.kv is %d, and KV transfer needs the ports up to %d, which do not exist: choose a smaller one" $name $first $last)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $name "decode") (include "tandem.sharesPrefixes" (dict "of" .tier)) (not .tier.settings.enablePrefixCaching) -}}
{{- include "tandem.mistake" (dict "found" .found "text" "decode.settings.kvSharePrefixes is for blocks that decode nodes cache: set decode.settings.enablePrefixCaching to true") -}}
{{- end -}}
{{- end -}}

{{- define "tandem.mistakes.security" -}}
{{- $found := .found -}}
{{- $values := .root.Values -}}
{{- $tls := $values.tls -}}
{{- $https := $values.router.https -}}
{{- if eq $tls.mode "certManager" -}}{{- if not $tls.certManager.issuerRef.name -}}
{{- include "tandem.mistake" (dict "found" $found "text" "tls.mode is certManager: set tls.certManager.issuerRef.name to an Issuer of an authority of your own") -}}
{{- end -}}{{- end -}}
{{- if eq $tls.mode "existingSecret" -}}
{{- range $component := prepend (keys .tiers | sortAlpha) "router" -}}
{{- if not (get $tls.existingSecret $component) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "tls.mode is existingSecret: set tls.existingSecret.%s to a Secret with tls.crt, tls.key and ca.crt, whose certificate names tandem-%s" $component (include "tandem.certificateRoles" $component | fromYamlArray | join " and tandem-"))) -}}
{{- end -}}
{{- end -}}
{{- else if or $tls.existingSecret.router $tls.existingSecret.prefill $tls.existingSecret.decode $tls.existingSecret.node -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "tls.existingSecret names Secrets, which tls.mode %s does not read: set tls.mode to existingSecret" $tls.mode)) -}}
{{- end -}}
{{- if eq $tls.mode "certManager" -}}
{{- $duration := trimSuffix "h" $tls.certManager.duration | int -}}
{{- if ge (trimSuffix "h" $tls.certManager.renewBefore | int) $duration -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "tls.certManager.renewBefore (%s) must be less than duration (%s)" $tls.certManager.renewBefore $tls.certManager.duration)) -}}
{{- end -}}
{{- end -}}
{{- if and $tls.acceptMissing (eq $tls.mode "none") -}}
{{- include "tandem.mistake" (dict "found" $found "text" "tls.acceptMissing is for the upgrade that turns TLS on, but tls.mode is none: set tls.mode to where certificates come from") -}}
{{- end -}}
{{- if $https.enabled -}}
{{- if not (or $https.existingSecret (include "tandem.hasTls" .root)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.https.enabled needs a certificate: set router.https.existingSecret to a Secret with tls.crt and tls.key, or tls.mode") -}}
{{- end -}}
{{- else if $https.existingSecret -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.https.existingSecret is set, but router.https.enabled is false: set it to true") -}}
{{- end -}}
{{- if and (eq $values.router.discovery.type "static") $values.auth.clusterToken.enabled (not $values.auth.clusterToken.existingSecret) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.discovery.type is static: the nodes must know the cluster token, so set auth.clusterToken.existingSecret to a Secret with theirs, or auth.clusterToken.enabled to false") -}}
{{- end -}}
{{- end -}}
