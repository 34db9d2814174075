{{/* Several models behind one router.

  A model is a root: the chart's own values with the model and the tiers of one entry of `models` laid
  over them, and the entry's name as `modelKey`. Templates of tiers render once for each root. The
  model of the values themselves (`model`, `prefill`, `decode`) is the plain root, without a key: its
  objects are called and labelled as if there were no other. */}}

{{- define "tandem.hasOwnModel" -}}
{{- $model := .Values.model -}}
{{- if or (not .Values.models) $model.name $model.storage.path $model.storage.image.reference }}true{{ end -}}
{{- end -}}

{{/* Puts the roots of all models into `into`, as `list`: root, into */}}
{{- define "tandem.models" -}}
{{- $root := .root -}}
{{- $list := list -}}
{{- if include "tandem.hasOwnModel" $root -}}{{- $list = append $list $root -}}{{- end -}}
{{- range $entry := $root.Values.models -}}
{{- $values := dict -}}
{{- range $key, $value := $root.Values -}}{{- $_ := set $values $key $value -}}{{- end -}}
{{- $model := deepCopy $root.Values.model -}}
{{- /* What names the checkpoint of another model is not a default. */ -}}
{{- $own := dict "name" "" "revision" "" "servedName" $entry.name "storage" (dict "path" "" "image" (dict "reference" "")) -}}
{{- include "tandem.overlay" (dict "base" $model "over" $own) -}}
{{- include "tandem.overlay" (dict "base" $model "over" (default dict $entry.model)) -}}
{{- $_ := set $values "model" $model -}}
{{- range $tier := list "prefill" "decode" "node" -}}
{{- $laid := deepCopy (get $root.Values $tier) -}}
{{- include "tandem.overlay" (dict "base" $laid "over" (default dict (get $entry $tier))) -}}
{{- $_ := set $values $tier $laid -}}
{{- end -}}
{{- with $entry.endpointPicker -}}
{{- $pool := deepCopy $root.Values.inferencePool -}}
{{- include "tandem.overlay" (dict "base" $pool "over" (dict "endpointPicker" (dict "name" .))) -}}
{{- $_ := set $values "inferencePool" $pool -}}
{{- end -}}
{{- $list = append $list (dict "Values" $values "Release" $root.Release "Chart" $root.Chart "Capabilities" $root.Capabilities "Files" $root.Files "modelKey" $entry.name) -}}
{{- end -}}
{{- $_ := set .into "list" $list -}}
{{- end -}}

{{/* Puts the tiers of all models into `into`, as `list`: each root, component, of. root, into */}}
{{- define "tandem.tierScopes" -}}
{{- $into := .into -}}
{{- $models := dict -}}
{{- include "tandem.models" (dict "root" .root "into" $models) -}}
{{- $list := list -}}
{{- range $model := $models.list -}}
{{- $tiers := dict -}}
{{- include "tandem.tiers" (dict "root" $model "into" $tiers) -}}
{{- range $name, $tier := $tiers -}}
{{- $list = append $list (dict "root" $model "component" $name "of" $tier "part" "") -}}
{{- end -}}
{{- end -}}
{{- $_ := set $into "list" $list -}}
{{- end -}}

{{/* The same, and the router before them. */}}
{{- define "tandem.scopes" -}}
{{- include "tandem.tierScopes" . -}}
{{- $_ := set .into "list" (prepend .into.list (dict "root" .root "component" "router" "of" .root.Values.router "part" "")) -}}
{{- end -}}

{{/* Names by which nodes serve a root's model, separated by commas; empty where only the checkpoint's
  folder says it. */}}
{{- define "tandem.servedNames" -}}
{{- if .Values.model.servedName -}}
{{- .Values.model.servedName -}}
{{- else if not (include "tandem.modelIsLocal" .) -}}
{{- .Values.model.name -}}
{{- end -}}
{{- end -}}

{{/* The name that clients ask for: without one of the values, nodes name a model as its folder is called,
  in a cache of the hub as the hub calls it. */}}
{{- define "tandem.clientName" -}}
{{- $names := include "tandem.servedNames" . -}}
{{- $folder := include "tandem.modelArgument" . | clean -}}
{{- if $names -}}
{{- splitList "," $names | first | trim -}}
{{- else if regexMatch "/models--[^/]+/snapshots/[^/]+$" $folder -}}
{{- dir (dir $folder) | base | trimPrefix "models--" | replace "--" "/" -}}
{{- else -}}
{{- base $folder -}}
{{- end -}}
{{- end -}}

{{/* The name by which routers count a root's model; empty while it is the only one. */}}
{{- define "tandem.countedName" -}}
{{- if .Values.models -}}{{- splitList "," (include "tandem.servedNames" .) | first | trim -}}{{- end -}}
{{- end -}}

{{/* Name of the ConfigMap with the router's model rules; empty: there are none. */}}
{{- define "tandem.modelRules" -}}
{{- $rules := .Values.modelRules -}}
{{- if or .Values.models $rules.aliases $rules.splits -}}
{{- include "tandem.name" (dict "root" . "component" "model-rules") -}}
{{- end -}}
{{- end -}}

{{/* The file, as docs/routing.md describes it. What JSON quotes, TOML reads. */}}
{{- define "tandem.modelRulesFile" -}}
{{- $models := dict -}}
{{- include "tandem.models" (dict "root" . "into" $models) -}}
{{- $names := list -}}
{{- range $model := $models.list -}}
{{- with include "tandem.servedNames" $model -}}{{- $names = append $names (splitList "," . | first | trim) -}}{{- end -}}
{{- end -}}
models = {{ toJson $names }}
{{- with .Values.modelRules.aliases }}

[aliases]
{{- range $name, $target := . }}
{{ toJson $name }} = {{ toJson $target }}
{{- end }}
{{- end }}
{{- range $name, $split := .Values.modelRules.splits }}

[splits.{{ toJson $name }}]
{{- range $version, $weight := $split }}
{{ toJson $version }} = {{ include "tandem.scalar" $weight }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Mistakes about names of models: root, found */}}
{{- define "tandem.mistakes.models" -}}
{{- $found := .found -}}
{{- $rules := .root.Values.modelRules -}}
{{- $models := dict -}}
{{- include "tandem.models" (dict "root" .root "into" $models) -}}
{{- $keys := dict -}}
{{- range $entry := .root.Values.models -}}
{{- if hasKey $keys $entry.name -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "models has two entries called %s: choose another name" $entry.name)) -}}
{{- end -}}
{{- $_ := set $keys $entry.name true -}}
{{- end -}}
{{- $served := dict -}}
{{- $knowsAll := true -}}
{{- range $model := $models.list -}}
{{- $names := include "tandem.servedNames" $model -}}
{{- if not $names -}}{{- $knowsAll = false -}}{{- end -}}
{{- range $name := splitList "," $names -}}
{{- with trim $name -}}
{{- if and (hasKey $served .) (not (hasKey $keys .)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "two models are served as %s: give one of them another model.servedName" .)) -}}
{{- else if and (hasKey $served .) (ne (get $served .) (get $model "modelKey" | toString)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "two models are served as %s: choose another name" .)) -}}
{{- end -}}
{{- $_ := set $served . (get $model "modelKey" | toString) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $target := $rules.aliases -}}
{{- if hasKey $served $name -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "modelRules.aliases has %s, which would hide the model of that name: choose another alias" $name)) -}}
{{- else if hasKey $rules.splits $name -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "modelRules has %s both as an alias and as a split: keep one of them" $name)) -}}
{{- end -}}
{{- if hasKey $rules.aliases $target -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "modelRules.aliases.%s leads to %s, which is an alias: name the model itself" $name $target)) -}}
{{- else if and $knowsAll (not (or (hasKey $served $target) (hasKey $rules.splits $target))) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "modelRules.aliases.%s leads to %s, which is no model here: name one of %s" $name $target (keys $served | sortAlpha | join ", "))) -}}
{{- end -}}
{{- end -}}
{{- range $name, $split := $rules.splits -}}
{{- range $version, $_ := $split -}}
{{- if or (hasKey $rules.aliases $version) (and (ne $version $name) (hasKey $rules.splits $version)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "modelRules.splits.%s has the version %s, which is a rule itself: name a model" $name $version)) -}}
{{- else if and $knowsAll (not (hasKey $served $version)) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "modelRules.splits.%s has the version %s, which is no model here: name one of %s" $name $version (keys $served | sortAlpha | join ", "))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey .root.Values.router.settings "modelRulesFile" -}}
{{- if include "tandem.modelRules" .root -}}
{{- include "tandem.mistake" (dict "found" $found "text" "router.settings.modelRulesFile names a file of rules, and models and modelRules make one: set one of them") -}}
{{- end -}}
{{- end -}}
{{- if .root.Values.inferencePool.enabled -}}
{{- $pickers := dict -}}
{{- range $model := $models.list -}}
{{- $picker := $model.Values.inferencePool.endpointPicker.name -}}
{{- if and $picker (hasKey $pickers $picker) -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "the endpoint picker %s would choose for two pools, and knows one: set endpointPicker of each entry of models" $picker)) -}}
{{- end -}}
{{- $_ := set $pickers $picker true -}}
{{- end -}}
{{- else -}}
{{- range $entry := .root.Values.models -}}
{{- if $entry.endpointPicker -}}
{{- include "tandem.mistake" (dict "found" $found "text" (printf "models (%s) has an endpointPicker, but inferencePool.enabled is false: set it to true" $entry.name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .root.Values.inferencePool.enabled .root.Values.models (include "tandem.hasOwnModel" .root) -}}
{{- include "tandem.mistake" (dict "found" $found "text" "inferencePool.enabled makes one pool for each model, and that of `model` could not leave out the pods of the others: move it into the list of models") -}}
{{- end -}}
{{- end -}}
