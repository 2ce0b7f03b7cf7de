{{- /* Name of every object of the release; also of the Lease. A Service takes no dot in it and no digit at its start. */}}
{{- define "speccache.name" -}}
{{- $name := .Release.Name | replace "." "-" }}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "speccache-%s" $name }}{{ end }}
{{- if not (contains "speccache" $name) }}{{ $name = printf "%s-speccache" $name }}{{ end }}
{{- printf "%s-operator" ($name | trunc 50 | trimSuffix "-") }}
{{- end }}

{{- /* Name of cluster-wide objects: two releases in two namespaces must not share them. */}}
{{- define "speccache.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "speccache.name" .) }}
{{- end }}

{{- define "speccache.selector" -}}
app.kubernetes.io/name: speccache-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "speccache.labels" -}}
{{ include "speccache.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "speccache.pullSecrets" -}}
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}

{{- /* What the operator does to objects in the namespaces it watches: generated from its table of children. */}}
{{- define "speccache.rules" -}}
{{ .Files.Get "files/rights.yaml" }}
{{- end }}
