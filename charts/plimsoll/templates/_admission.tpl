{{/* A ValidatingAdmissionPolicy of this name for what a ServiceAccount writes, and for nobody else's writes. The caller's dict
gives root, the account's component, the policy's name, what it is about (groups, resources, operations unless all), and names the
template with its variables and validations. With an expression "about" it judges what that matches, whoever writes it. Whatever
fails, fails closed. */}}
{{- define "plimsoll.admissionPolicy" -}}
{{- $account := include "plimsoll.name" . }}
{{- $name := printf "%s-%s" $account .name }}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ $name }}
  labels: {{- include "plimsoll.labels" . | nindent 4 }}
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
      {{- .about | default (printf "request.userInfo.username == 'system:serviceaccount:%s:%s'" .root.Release.Namespace $account) | nindent 6 }}
  {{- include .rules . | nindent 2 }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ $name }}
  labels: {{- include "plimsoll.labels" . | nindent 4 }}
spec:
  policyName: {{ $name }}
  # Audit: a refusal stands in the API server's audit log too, as nothing that an honest agent does is ever refused.
  validationActions: [Deny, Audit]
{{- end -}}

{{/* Variables: the node of the agent's token, as the kubelet had it bound to the agent's pod ('' where it is bound to none),
and the name of what is written. */}}
{{- define "plimsoll.admission.caller" -}}
- name: node
  expression: request.userInfo.?extra[?'authentication.kubernetes.io/node-name'][?0].orValue('')
- name: written
  expression: "dyn(request.operation == 'DELETE' ? oldObject : object)"
- name: name
  expression: string(variables.written.metadata.name)
{{- end -}}

{{/* A validation: who has no node writes nothing. */}}
{{- define "plimsoll.admission.bound" -}}
- expression: variables.node != ''
  reason: Forbidden
  message: the token names no node; an agent writes with the token of its own pod, which its kubelet gives it
{{- end -}}

{{/* Variables: which fields of a Node a write changes that are neither our taint nor our condition. What only API servers
write is passed over. */}}
{{- define "plimsoll.admission.nodeChanges" -}}
{{- $ours := dict "metadata" (list "managedFields" "resourceVersion" "generation") "spec" (list "taints") "status" (list "conditions") }}
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
{{- $ourTaint := "taint.key == 'interference.crane.io' && taint.?effect.orValue('') in ['NoSchedule', 'PreferNoSchedule']" }}
- name: ourTaints
  expression: variables.taints.filter(taint, {{ $ourTaint }})
- name: otherTaints
  expression: variables.taints.filter(taint, !({{ $ourTaint }}))
- name: otherTaintsBefore
  expression: variables.taintsBefore.filter(taint, !({{ $ourTaint }}))
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
    (variables.otherTaints == variables.otherTaintsBefore ? [] : ['a taint that is not ours'])
    + (variables.otherConditions == variables.otherConditionsBefore ? [] : ['a condition that is not ours'])
{{- end -}}

{{/* Whether two maps are the same but for the fields that are free. */}}
{{- define "plimsoll.admission.same" -}}
{{- $free := toJson .free | replace "\"" "'" -}}
({{ .after }}.all(field, field in {{ $free }} || (field in {{ .before }} && {{ .after }}[field] == {{ .before }}[field])) && {{ .before }}.all(field, field in {{ $free }} || field in {{ .after }}))
{{- end -}}

{{/* Variables for that, of the object's metadata. */}}
{{- define "plimsoll.admission.metadata" -}}
- name: metadata
  expression: dyn(object).?metadata.orValue({})
- name: metadataBefore
  expression: dyn(oldObject).?metadata.orValue({})
- name: sameMetadata
  expression: {{ include "plimsoll.admission.same" (dict "after" "variables.metadata" "before" "variables.metadataBefore" "free" (list "managedFields" "resourceVersion" "generation")) | quote }}
{{- end -}}
