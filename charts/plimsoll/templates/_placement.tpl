{{/* Preferences for nodes with a low load: the sum of the matching weights is the headroom min(8, 20 - load/5), in bits. All loads up to 60 count
alike, so that an idle node does not attract a whole burst. NotIn matches nodes without the label, and those with any other text, too: with a sum of 4
they count as a node at 80. Weights are small, because they share a scale with the preferences of the pods. */}}
{{- define "plimsoll.placement.terms" -}}
- weight: 8
  preference: {matchExpressions: [{key: plimsoll.dev/load, operator: In, values: ["0", "5", "10", "15", "20", "25", "30", "35", "40", "45", "50", "55", "60"]}]}
- weight: 4 # 65 to 80
  preference: {matchExpressions: [{key: plimsoll.dev/load, operator: NotIn, values: ["0", "5", "10", "15", "20", "25", "30", "35", "40", "45", "50", "55", "60", "85", "90", "95", "100"]}]}
- weight: 2
  preference: {matchExpressions: [{key: plimsoll.dev/load, operator: In, values: ["65", "70", "85", "90"]}]}
- weight: 1
  preference: {matchExpressions: [{key: plimsoll.dev/load, operator: In, values: ["65", "75", "85", "95"]}]}
{{- end -}}

{{/* The same terms as a list in CEL. Values of different types need dyn(). */}}
{{- define "plimsoll.placement.celTerms" -}}
{{- $terms := list }}
{{- range include "plimsoll.placement.terms" . | fromYamlArray }}
{{- $expressions := list }}
{{- range .preference.matchExpressions }}
{{- $expressions = append $expressions (printf "{'key': dyn('%s'), 'operator': dyn('%s'), 'values': dyn(['%s'])}" .key .operator (join "', '" .values)) }}
{{- end }}
{{- $terms = append $terms (printf "{'weight': dyn(%d), 'preference': dyn({'matchExpressions': [%s]})}" (int .weight) (join ", " $expressions)) }}
{{- end }}
{{- printf "[%s]" (join ",\n" $terms) }}
{{- end -}}

{{/* The version of the API of MutatingAdmissionPolicies: v1 since Kubernetes 1.36. Empty if the cluster serves none. Without a cluster Helm knows only
the version of Kubernetes. */}}
{{- define "plimsoll.placement.policyVersion" -}}
{{- $served := .Capabilities.APIVersions }}
{{- if $served.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy" }}v1
{{- else if $served.Has "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy" }}v1beta1
{{- else if not (include "plimsoll.asksCluster" .) }}{{ semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version | ternary "v1" "v1beta1" }}
{{- end }}
{{- end -}}

{{/* Not empty if the cluster runs Karpenter, as EKS Auto Mode and AKS with node auto-provisioning do. */}}
{{- define "plimsoll.karpenter" -}}
{{- range .Capabilities.APIVersions }}{{ if hasPrefix "karpenter.sh/" . }}true{{ end }}{{ end }}
{{- end -}}

{{/* The image of the second scheduler. Its version is the cluster's, without a suffix of a provider such as -gke.100 or +k3s1. */}}
{{- define "plimsoll.placement.schedulerImage" -}}
{{- $version := semver .Capabilities.KubeVersion.Version }}
{{- $tag := printf "v%d.%d.%d" $version.Major $version.Minor $version.Patch -}}
image: {{ include "plimsoll.imageReference" (dict "root" . "image" .Values.placement.scheduler.image "tag" $tag) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* The configuration of the second scheduler. The plugin NodeAffinity keeps its weight of 2: more would outweigh the spreading of a Service's pods. */}}
{{- define "plimsoll.placement.schedulerConfig" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: true, resourceName: {{ include "plimsoll.name" . }}, resourceNamespace: {{ include "plimsoll.namespace" .root }}}
profiles:
- schedulerName: plimsoll
  pluginConfig:
  - name: NodeAffinity
    args:
      addedAffinity:
        preferredDuringSchedulingIgnoredDuringExecution:
        {{- include "plimsoll.placement.terms" .root | nindent 8 }}
{{- end -}}

{{/* crane-scheduler's policy for the extender. Empty without one. */}}
{{- define "plimsoll.placement.policy" -}}
{{- if .Values.placement.schedulerAPI.enabled }}{{ .Values.placement.schedulerAPI.policy }}{{ end }}
{{- end -}}

{{/* The file of --poll. Empty if nothing is polled. Without services it is the agents of the release. */}}
{{- define "plimsoll.placement.polling" -}}
{{- with .Values.placement.polling }}
{{- if .enabled }}
{{- $agents := list (dict "namespace" (include "plimsoll.namespace" $) "name" (include "plimsoll.name" (dict "root" $ "component" "agent")) "port" "http") }}
{{- dict "interval" .interval "timeout" .timeout "services" (.services | default $agents) | toYaml }}
{{- end }}
{{- end }}
{{- end -}}
