{{/* A ValidatingAdmissionPolicy for the writes of one ServiceAccount. The dict has root, the account's component, the policy's name,
groups, resources, operations (default: all), and the name of the template with variables and validations. With an expression "about"
the policy applies to requests that match it, from any user. Errors fail closed. */}}
{{- define "plimsoll.admissionPolicy" -}}
{{- $account := include "plimsoll.account" . }}
{{- $name := printf "%s-%s" $account .name }}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ $name }}
  {{- include "plimsoll.metadata" . | nindent 2 }}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
    - apiGroups: {{ toJson .groups }}
      apiVersions: ["*"]
      operations: {{ .operations | default (list "CREATE" "UPDATE" "DELETE") | toJson }}
      resources: {{ toJson .resources }}
  matchConditions:
  - name: {{ .component }}
    expression: >-
      {{- .about | default (printf "request.userInfo.username == 'system:serviceaccount:%s:%s'" (include "plimsoll.namespace" .root) $account) | nindent 6 }}
  {{- include .rules . | nindent 2 }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ $name }}
  {{- include "plimsoll.metadata" . | nindent 2 }}
spec:
  policyName: {{ $name }}
  # Audit: refusals are also in the API server's audit log, because only a compromised or faulty agent causes one.
  validationActions: [Deny, Audit]
{{- end -}}

{{/* Variables: the node that the agent's token is bound to ('' if none), and the name of the written object. */}}
{{- define "plimsoll.admission.caller" -}}
- name: node
  expression: request.userInfo.?extra[?'authentication.kubernetes.io/node-name'][?0].orValue('')
- name: written
  expression: "dyn(request.operation == 'DELETE' ? oldObject : object)"
- name: name
  expression: string(variables.written.metadata.name)
{{- end -}}

{{/* A validation: a token that is not bound to a node may write nothing. */}}
{{- define "plimsoll.admission.bound" -}}
- expression: variables.node != ''
  reason: Forbidden
  message: the token is not bound to a node; an agent must use the token that the kubelet issued for its pod
{{- end -}}

{{/* The keys of crane-scheduler's annotations, as a list in CEL. */}}
{{- define "plimsoll.admission.craneKeys" -}}
['plimsoll.dev/crane-annotations', 'node_hot_value', 'cpu_usage_avg_5m', 'cpu_usage_max_avg_1h', 'cpu_usage_max_avg_1d', 'mem_usage_avg_5m', 'mem_usage_max_avg_1h', 'mem_usage_max_avg_1d']
{{- end -}}

{{/* Whether an agent may change the annotation "key", in CEL. While the feature is off it may remove what an agent wrote, which has the
time of plimsoll.dev/crane-annotations. */}}
{{- define "plimsoll.admission.isCrane" -}}
key in {{ include "plimsoll.admission.craneKeys" . }}
{{- if not .root.Values.placement.craneAnnotations.enabled }} && !(key in variables.annotations) && (key == 'plimsoll.dev/crane-annotations'
|| string(variables.annotationsBefore[key]).endsWith(',' + variables.annotationsBefore[?'plimsoll.dev/crane-annotations'].orValue(',')))
{{- end }}
{{- end -}}

{{/* Variables: the changed fields of a Node other than our label, our taints and our condition, and for the agent crane-scheduler's
annotations. Fields that only API servers write are ignored. */}}
{{- define "plimsoll.admission.nodeChanges" -}}
{{- $ours := dict "metadata" (list "managedFields" "resourceVersion" "generation" "labels" "annotations") "spec" (list "taints") "status" (list "conditions") }}
{{- range $part, $_ := $ours }}
- name: {{ $part }}
  expression: dyn(object).?{{ $part }}.orValue({})
- name: {{ $part }}Before
  expression: dyn(oldObject).?{{ $part }}.orValue({})
{{- end }}
- name: taints
  expression: variables.spec.?taints.orValue([])
- name: taintsBefore
  expression: variables.specBefore.?taints.orValue([])
{{- $ourTaint := "(taint.key == 'interference.crane.io' && taint.?effect.orValue('') == 'NoSchedule' || taint.key in ['interference.crane.io', 'plimsoll.dev/busy'] && taint.?effect.orValue('') == 'PreferNoSchedule')" }}
- name: ourTaints
  expression: variables.taints.filter(taint, {{ $ourTaint }})
- name: otherTaints
  expression: variables.taints.filter(taint, !({{ $ourTaint }}))
- name: otherTaintsBefore
  expression: variables.taintsBefore.filter(taint, !({{ $ourTaint }}))
- name: labels
  expression: variables.metadata.?labels.orValue({})
- name: labelsBefore
  expression: variables.metadataBefore.?labels.orValue({})
- name: setsLoad
  expression: >-
    'plimsoll.dev/load' in variables.labels && variables.labels[?'plimsoll.dev/load'] != variables.labelsBefore[?'plimsoll.dev/load']
- name: otherLabels
  expression: >-
    variables.labels.filter(key, key != 'plimsoll.dev/load' && variables.labels[?key] != variables.labelsBefore[?key])
    + variables.labelsBefore.filter(key, key != 'plimsoll.dev/load' && !(key in variables.labels))
- name: annotations
  expression: variables.metadata.?annotations.orValue({})
- name: annotationsBefore
  expression: variables.metadataBefore.?annotations.orValue({})
- name: changedAnnotations
  expression: >-
    variables.annotations.filter(key, variables.annotations[?key] != variables.annotationsBefore[?key])
    + variables.annotationsBefore.filter(key, !(key in variables.annotations))
- name: otherAnnotations
  {{- if eq .component "agent" }}
  expression: >-
    variables.changedAnnotations.filter(key, !({{ include "plimsoll.admission.isCrane" . | nindent 4 }}))
  {{- else }}
  expression: variables.changedAnnotations
  {{- end }}
- name: otherConditions
  expression: variables.status.?conditions.orValue([]).filter(condition, condition.type != 'InterferenceIdentified')
- name: otherConditionsBefore
  expression: variables.statusBefore.?conditions.orValue([]).filter(condition, condition.type != 'InterferenceIdentified')
- name: changed
  expression: >-
    {{- range $part, $free := $ours }}
    variables.{{ $part }}.filter(field, !(field in {{ toJson $free | replace "\"" "'" }})
    && (!(field in variables.{{ $part }}Before) || variables.{{ $part }}[field] != variables.{{ $part }}Before[field])).map(field, '{{ $part }}.' + string(field))
    + variables.{{ $part }}Before.filter(field, !(field in {{ toJson $free | replace "\"" "'" }})
    && !(field in variables.{{ $part }})).map(field, '{{ $part }}.' + string(field))
    +
    {{- end }}
    (variables.otherLabels == [] ? [] : ['metadata.labels'])
    + (variables.otherAnnotations == [] ? [] : ['metadata.annotations'])
    + (variables.otherTaints == variables.otherTaintsBefore ? [] : ['other taints'])
    + (variables.otherConditions == variables.otherConditionsBefore ? [] : ['other conditions'])
{{- end -}}

{{/* Whether two maps are equal except for the given fields. */}}
{{- define "plimsoll.admission.same" -}}
{{- $free := toJson .free | replace "\"" "'" -}}
({{ .after }}.all(field, field in {{ $free }} || (field in {{ .before }} && {{ .after }}[field] == {{ .before }}[field])) && {{ .before }}.all(field, field in {{ $free }} || field in {{ .after }}))
{{- end -}}

{{/* Variables for this comparison, of the object's metadata. */}}
{{- define "plimsoll.admission.metadata" -}}
- name: metadata
  expression: dyn(object).?metadata.orValue({})
- name: metadataBefore
  expression: dyn(oldObject).?metadata.orValue({})
- name: sameMetadata
  expression: {{ include "plimsoll.admission.same" (dict "after" "variables.metadata" "before" "variables.metadataBefore" "free" (list "managedFields" "resourceVersion" "generation")) | quote }}
{{- end -}}
