{{/* The name of a component's objects; the dict has root and component. A long release name is cut, not the component's, so that names
stay unique. */}}
{{- define "plimsoll.name" -}}
{{- $release := ternary .root.Release.Name (printf "%s-plimsoll" .root.Release.Name) (contains "plimsoll" .root.Release.Name) -}}
{{- $room := sub 62 (len .component) | int -}}
{{- printf "%s-%s" ($release | trunc $room | trimAll "-.") .component -}}
{{- end -}}

{{/* Labels that select a component's pods. */}}
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

{{- define "plimsoll.image" -}}
{{- $tagged := printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
image: {{ empty .Values.image.digest | ternary $tagged (printf "%s@%s" .Values.image.repository .Values.image.digest) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* Security context of both containers. */}}
{{- define "plimsoll.hardening" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
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

{{/* Root, because cgroup files belong to root, without anything else. */}}
{{- define "plimsoll.agentHardening" -}}
runAsUser: 0
{{- include "plimsoll.hardening" . | nindent 0 }}
{{- $usual := empty (include "plimsoll.onOpenShift" .) | ternary dict (dict "type" "spc_t") }}
{{- with .Values.agent.seLinuxOptions | default $usual }}
seLinuxOptions: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* "true" if pods need SecurityContextConstraints. */}}
{{- define "plimsoll.onOpenShift" -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}true{{ end -}}
{{- end -}}

{{- define "plimsoll.livenessProbe" -}}
livenessProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "plimsoll.probes" -}}
{{ include "plimsoll.livenessProbe" . }}
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{/* The file of windows, for agents and controllers: the annotation restarts their pods when it changes, because they read it once. */}}
{{- define "plimsoll.windowsAnnotation" -}}
{{- with .Values.windows }}
plimsoll.dev/windows: {{ toJson . | sha256sum | trunc 16 | quote }}
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

{{/* Labels of the nodes that a pod may run on; the dict has those from the values. The image is for Linux on amd64, and a pod that
tolerates everything would also be created on other nodes. */}}
{{- define "plimsoll.nodeLabels" -}}
{{- merge (dict) (.wanted | default dict) (dict "kubernetes.io/os" "linux" "kubernetes.io/arch" "amd64") | toYaml }}
{{- end -}}

{{- define "plimsoll.nodeSelector" -}}
nodeSelector: {{- include "plimsoll.nodeLabels" . | nindent 2 }}
{{- end -}}

{{/* The pod of a Helm hook's Job; the dict has root, component, account and args. */}}
{{- define "plimsoll.jobPod" -}}
metadata:
  labels: {{- include "plimsoll.labels" . | nindent 4 }}
  annotations: {plimsoll.dev/protected: "true"}
spec:
  restartPolicy: Never
  serviceAccountName: {{ .account }}
  automountServiceAccountToken: true
  enableServiceLinks: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.controller.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext: {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
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
    securityContext: {{- include "plimsoll.hardening" .root | nindent 6 }}
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

{{/* Replicas spread over zones first; within a zone the affinity below prefers different nodes. A replica always runs rather than wait. */}}
{{- define "plimsoll.spreadConstraints" -}}
topologySpreadConstraints:
- topologyKey: topology.kubernetes.io/zone
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "plimsoll.selectorLabels" . | nindent 6 }}
  matchLabelKeys: [pod-template-hash]
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
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "plimsoll.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "plimsoll.selectorLabels" . | nindent 6 }}
{{- end -}}
