{{/* Arguments for the eviction budgets. */}}
{{- define "plimsoll.evictionArgs" -}}
{{- with .Values.evictionBudget }}
{{- if .enabled }}
- --eviction-record={{ include "plimsoll.name" (dict "root" $ "component" "evictions") }}
- --eviction-budget-fleet={{ .fleet }}
- --eviction-budget-zone={{ .zone }}
- --eviction-budget-node={{ .node }}
- --eviction-budget-namespace={{ .namespace }}
- --eviction-budget-owner={{ .owner }}
{{- else }}
- --no-eviction-budgets
{{- end }}
{{- end }}
{{- end -}}
