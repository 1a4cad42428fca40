{{/* The name of what belongs to a component, the caller's dict giving root and component. */}}
{{- define "plimsoll.name" -}}
{{- $release := ternary .root.Release.Name (printf "%s-plimsoll" .root.Release.Name) (contains "plimsoll" .root.Release.Name) -}}
{{- printf "%s-%s" $release .component | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels by which selectors find a component's pods. */}}
{{- define "plimsoll.selectorLabels" -}}
app.kubernetes.io/name: plimsoll
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "plimsoll.labels" -}}
{{ include "plimsoll.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "plimsoll.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* What both containers are denied. */}}
{{- define "plimsoll.hardening" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "plimsoll.probes" -}}
livenessProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}
