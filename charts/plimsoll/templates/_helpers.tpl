{{/* The name of a component's objects; the dict has root and component. A long release name is cut, not the component's, so that names
stay unique. */}}
{{- define "plimsoll.name" -}}
{{- $chart := .root.Values.nameOverride | default "plimsoll" -}}
{{- $release := ternary .root.Release.Name (printf "%s-%s" .root.Release.Name $chart) (contains $chart .root.Release.Name) -}}
{{- $room := sub 62 (len .component) | int -}}
{{- printf "%s-%s" (.root.Values.fullnameOverride | default $release | trunc $room | trimAll "-.") .component -}}
{{- end -}}

{{/* The namespace of all objects that have one, but for Leases. Only Helm's own records are in that of the release. */}}
{{- define "plimsoll.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace -}}
{{- end -}}

{{/* The name of a component's ServiceAccount. Admission policies and flow schemas are named for the account that they are about, as
`plimsoll doctor` expects. */}}
{{- define "plimsoll.account" -}}
{{- $values := get (pick .root.Values "agent" "controller") .component | default dict -}}
{{- dig "serviceAccount" "name" "" $values | default (include "plimsoll.name" .) -}}
{{- end -}}

{{/* The ServiceAccount of agents or controller, with a separator. */}}
{{- define "plimsoll.serviceAccount" -}}
{{- $account := (get .root.Values .component).serviceAccount }}
{{- if $account.create }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "plimsoll.account" . }}
  namespace: {{ include "plimsoll.namespace" .root }}
  {{- include "plimsoll.metadata" (merge (dict "annotations" $account.annotations) .) | nindent 2 }}
# Only its own pods mount the token.
automountServiceAccountToken: false
---
{{- end }}
{{- end -}}

{{/* Labels that select a component's pods. They don't depend on names, because they can't be changed in an upgrade, and `plimsoll doctor`
finds the objects by them. */}}
{{- define "plimsoll.selectorLabels" -}}
app.kubernetes.io/name: plimsoll
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "plimsoll.labels" -}}
{{ include "plimsoll.selectorLabels" . }}
app.kubernetes.io/part-of: plimsoll
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels and annotations of an object; the dict has root and component, and may have labels and annotations of that object, which are
stronger than those for all objects. None replaces a label of ours. */}}
{{- define "plimsoll.metadata" -}}
labels: {{- merge (dict) (include "plimsoll.labels" . | fromYaml) (.labels | default dict) .root.Values.commonLabels | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The same for pods; labels and annotations are ours, podLabels and podAnnotations the user's. */}}
{{- define "plimsoll.podMetadata" -}}
labels: {{- merge (dict) (include "plimsoll.labels" . | fromYaml) (.labels | default dict) (.podLabels | default dict) .root.Values.commonLabels | toYaml | nindent 2 }}
# A PodQOS may match everything, but none of our pods may be throttled or evicted.
annotations: {{- merge (dict "plimsoll.dev/protected" "true") (.annotations | default dict) (.podAnnotations | default dict) | toYaml | nindent 2 }}
{{- end -}}

{{/* The reference of an image; the dict has root, image and tag, the default tag. Another registry takes the place of the one in the
repository. */}}
{{- define "plimsoll.imageReference" -}}
{{- $repository := .image.repository }}
{{- with .root.Values.global.imageRegistry | default .image.registry }}
{{- $parts := splitList "/" $repository }}
{{- if and (gt (len $parts) 1) (regexMatch "[.:]|^localhost$" (first $parts)) }}
{{- $parts = rest $parts }}
{{- end }}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (join "/" $parts) }}
{{- end }}
{{- empty .image.digest | ternary (printf "%s:%s" $repository (.image.tag | default .tag)) (printf "%s@%s" $repository .image.digest) }}
{{- end -}}

{{- define "plimsoll.image" -}}
image: {{ include "plimsoll.imageReference" (dict "root" . "image" .Values.image "tag" .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{- define "plimsoll.pullSecrets" -}}
{{- $secrets := list }}
{{- range concat (.Values.global.imagePullSecrets | default list) .Values.imagePullSecrets }}
{{- $secrets = append $secrets (kindIs "string" . | ternary (dict "name" .) .) }}
{{- end }}
{{- with uniq $secrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The layouts as JSON: those of the values, or the one of a distribution, as docs/install.md has it. */}}
{{- define "plimsoll.layouts" -}}
{{- $layouts := .Values.agent.layouts }}
{{- with .Values.agent.distribution }}
{{- $kubepods := eq . "kind" | ternary "kubelet.slice/kubelet-kubepods.slice" "kubepods.slice" }}
{{- $layouts = list (dict "name" "v2" "cgroup" "v2" "kubepods" $kubepods "nodeSelector" dict) }}
{{- end }}
{{- toJson $layouts }}
{{- end -}}

{{/* An agent's mounts from its node: the cgroup trees read-only, and in each the pods' part writable. The dict has root and layout. */}}
{{- define "plimsoll.cgroupTrees" -}}
{{ eq .layout.cgroup "v1" | ternary (list "cpu" "cpuacct" "memory") (list "") | toJson }}
{{- end -}}

{{- define "plimsoll.cgroupMounts" -}}
{{- $kubepods := .layout.kubepods | trimAll "/" }}
{{- range $tree := include "plimsoll.cgroupTrees" . | fromJsonArray }}
{{- $at := list "/host/sys/fs/cgroup" $tree | compact | join "/" }}
- {name: {{ list "cgroup" $tree | compact | join "-" }}, mountPath: {{ $at }}, readOnly: true, recursiveReadOnly: IfPossible}
- {name: {{ list "pods" $tree | compact | join "-" }}, mountPath: {{ $at }}/{{ $kubepods }}}
{{- end }}
{{- end -}}

{{- define "plimsoll.cgroupVolumes" -}}
{{- $kubepods := .layout.kubepods | trimAll "/" }}
{{- range $tree := include "plimsoll.cgroupTrees" . | fromJsonArray }}
{{- $at := list "/sys/fs/cgroup" $tree | compact | join "/" }}
# Directory: a missing one must not be created, because it would be a cgroup.
- name: {{ list "cgroup" $tree | compact | join "-" }}
  hostPath: {path: {{ $at }}, type: Directory}
- name: {{ list "pods" $tree | compact | join "-" }}
  hostPath: {path: {{ $at }}/{{ $kubepods }}, type: Directory}
{{- end }}
{{- end -}}

{{/* Security context of an agent's container. On OpenShift it needs the type that containers of an administrator have. */}}
{{- define "plimsoll.agentSecurityContext" -}}
{{- $context := deepCopy .Values.agent.securityContext }}
{{- $usual := empty (include "plimsoll.onOpenShift" .) | ternary dict (dict "type" "spc_t") }}
{{- with $context.seLinuxOptions | default .Values.agent.seLinuxOptions | default $usual }}
{{- $_ := set $context "seLinuxOptions" . }}
{{- end }}
{{- toYaml $context }}
{{- end -}}

{{/* "true" if pods need SecurityContextConstraints. */}}
{{- define "plimsoll.onOpenShift" -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}true{{ end -}}
{{- end -}}

{{/* A probe; the dict has path, values (times and thresholds), and port and scheme if it is not the HTTP port. */}}
{{- define "plimsoll.probe" -}}
httpGet: {path: {{ .path }}, port: {{ .port | default "http" }}{{ with .scheme }}, scheme: {{ . }}{{ end }}}
{{- with .values }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of the pods of agents and controller; the dict may have labels. The annotation for the file of windows restarts
the pods when it changes, because they read it once. */}}
{{- define "plimsoll.workloadMetadata" -}}
{{- $values := get .root.Values .component }}
{{- $annotations := dict }}
{{- with .root.Values.windows }}
{{- $_ := set $annotations "plimsoll.dev/windows" (toJson . | sha256sum | trunc 16) }}
{{- end }}
{{- if eq .component "controller" }}
{{- with include "plimsoll.placement.polling" .root }}
{{- $_ := set $annotations "plimsoll.dev/polling" (sha256sum . | trunc 16) }}
{{- end }}
{{- end }}
{{- include "plimsoll.podMetadata" (merge (dict "annotations" $annotations "podLabels" $values.podLabels "podAnnotations" $values.podAnnotations) .) }}
{{- end -}}

{{/* Not written for text, so that an older image starts. */}}
{{- define "plimsoll.logArgument" -}}
{{- if ne .Values.logFormat "text" }}
- --log-format={{ .Values.logFormat }}
{{- end }}
{{- end -}}

{{- define "plimsoll.windowsArgument" -}}
{{- if .Values.windows }}
- --windows=/etc/plimsoll/windows/windows.yaml
{{- end }}
{{- end -}}

{{- define "plimsoll.windowsMount" -}}
{{- if .Values.windows }}
- {name: windows, mountPath: /etc/plimsoll/windows, readOnly: true}
{{- end }}
{{- end -}}

{{- define "plimsoll.windowsVolume" -}}
{{- if .Values.windows }}
- name: windows
  configMap: {name: {{ include "plimsoll.name" (dict "root" . "component" "windows") }}}
{{- end }}
{{- end -}}

{{/* A pod's token for API servers, and the files that the kubelet would mount with it. It is valid for an hour; an automatically mounted
one would be valid for a year. */}}
{{- define "plimsoll.tokenMount" -}}
- {name: api-access, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end -}}

{{- define "plimsoll.tokenVolume" -}}
- name: api-access
  projected:
    sources:
    - serviceAccountToken: {path: token, expirationSeconds: 3600}
    - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
    - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end -}}

{{/* Labels of the nodes that a pod may run on; the dict has those from the values. The image is for Linux, and a pod that
tolerates everything would also be created on other nodes. */}}
{{- define "plimsoll.nodeLabels" -}}
{{- merge (dict) (.wanted | default dict) (dict "kubernetes.io/os" "linux") | toYaml }}
{{- end -}}

{{- define "plimsoll.nodeSelector" -}}
nodeSelector: {{- include "plimsoll.nodeLabels" . | nindent 2 }}
{{- end -}}

{{/* The pod of a Helm hook's Job; the dict has root, component, account and args. */}}
{{- define "plimsoll.jobPod" -}}
metadata: {{- include "plimsoll.podMetadata" . | nindent 2 }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ .account }}
  automountServiceAccountToken: true
  enableServiceLinks: false
  {{- include "plimsoll.pullSecrets" .root | nindent 2 }}
  {{- with .root.Values.controller.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext: {{- toYaml .root.Values.controller.podSecurityContext | nindent 4 }}
  {{- include "plimsoll.nodeSelector" (dict "wanted" .root.Values.controller.nodeSelector) | nindent 2 }}
  tolerations:
  # All nodes may be closed, by us.
  - {key: interference.crane.io, operator: Exists}
  {{- with .root.Values.controller.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  containers:
  - name: {{ .component }}
    {{- include "plimsoll.image" .root | nindent 4 }}
    args: {{- toYaml .args | nindent 4 }}
    # `kubectl describe pod` shows the reason of a failure too.
    terminationMessagePolicy: FallbackToLogsOnError
    resources: {{- toYaml .root.Values.controller.resources | nindent 6 }}
    securityContext: {{- toYaml .root.Values.controller.securityContext | nindent 6 }}
{{- end -}}

{{/* "true" if cert-manager issues the replicas' certificate. */}}
{{- define "plimsoll.certManager" -}}
{{- if .Values.metricsAPI.certManager.enabled }}true{{ end -}}
{{- end -}}

{{/* "true" if Helm is connected to a cluster, unlike in `helm template`. */}}
{{- define "plimsoll.asksCluster" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" }}true{{ end -}}
{{- end -}}

{{/* "true" if that cluster has no definitions of policies yet. */}}
{{- define "plimsoll.lacksDefinitions" -}}
{{- if and (include "plimsoll.asksCluster" .) (not (.Capabilities.APIVersions.Has "ensurance.crane.io/v1alpha1/NodeQOS")) }}true{{ end -}}
{{- end -}}

{{/* Replicas spread over zones first; within a zone the affinity below prefers different nodes. A replica always runs rather than wait.
Constraints of the user, in the dict, are instead of that; without a labelSelector they get that of the replicas. */}}
{{- define "plimsoll.spreadConstraints" -}}
{{- $selector := dict "matchLabels" (include "plimsoll.selectorLabels" . | fromYaml) -}}
topologySpreadConstraints:
{{- range .constraints }}
- {{- hasKey . "labelSelector" | ternary . (merge (dict "labelSelector" $selector) .) | toYaml | nindent 2 }}
{{- else }}
- topologyKey: topology.kubernetes.io/zone
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "plimsoll.selectorLabels" . | nindent 6 }}
  matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end -}}

{{- define "plimsoll.spreadAffinity" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "plimsoll.selectorLabels" . | nindent 12 }}
{{- end -}}

{{/* A PodDisruptionBudget for the replicas of a component. A replica that is not ready must not keep its node from being drained. */}}
{{- define "plimsoll.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "plimsoll.name" . }}
  namespace: {{ include "plimsoll.namespace" .root }}
  {{- include "plimsoll.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .maxUnavailable | default 1 }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "plimsoll.selectorLabels" . | nindent 6 }}
{{- end -}}
