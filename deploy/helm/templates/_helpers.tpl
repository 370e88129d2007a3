{{- define "headrace.name" -}}
{{- if contains "headrace" .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-headrace" (.Release.Name | trunc 41) }}
{{- end -}}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "headrace.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001 # mounted secrets and claims are readable for the server
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- /* The variables that the chart sets: a list of {name, value}. */ -}}
{{- define "headrace.env" -}}
{{- $v := .Values }}
# The probes' port: it serves only health, in plain text, for the kubelet; load on the other port does not delay it.
- { name: HEADRACE_HEALTH_LISTEN, value: "0.0.0.0:50052" }
- { name: HEADRACE_DRAIN_TIMEOUT, value: {{ $v.drainSeconds | quote }} }
- { name: HEADRACE_MAX_CONNECTION_AGE, value: {{ $v.maxConnectionAgeSeconds | quote }} }
{{- with $v.model.name }}
- { name: HEADRACE_MODEL, value: {{ . | quote }} }
{{- end }}
{{- if $v.tls.secret }}
- { name: HEADRACE_INSECURE, value: "0" }
- { name: HEADRACE_TLS_CERT, value: /tls/tls.crt }
- { name: HEADRACE_TLS_KEY, value: /tls/tls.key }
{{- if $v.tls.clientCa }}
- { name: HEADRACE_TLS_CLIENT_CA, value: /tls/ca.crt }
{{- end }}
{{- end }}
{{- if $v.callers.secret }}
- { name: HEADRACE_AUTH_FILE, value: /callers/callers.toml }
{{- end }}
{{- if $v.openai.enabled }}
- { name: HEADRACE_OPENAI, value: "0.0.0.0:{{ $v.openai.port }}" }
{{- $host := include "headrace.name" . }}
{{- $service := printf "%s.%s" $host .Release.Namespace }}
{{- $hosts := list $host $service (printf "%s.svc" $service) (printf "%s.svc.cluster.local" $service) }}
- { name: HEADRACE_OPENAI_HOST, value: {{ concat $hosts $v.openai.hosts | join " " | quote }} }
{{- end }}
{{- $metrics := list }}
{{- if $v.telemetry.prometheus }}
{{- $metrics = append $metrics "prometheus" }}
- { name: OTEL_EXPORTER_PROMETHEUS_HOST, value: 0.0.0.0 }
- { name: OTEL_EXPORTER_PROMETHEUS_PORT, value: "9464" }
{{- end }}
{{- if $v.telemetry.otlpMetrics }}
{{- $metrics = append $metrics "otlp" }}
{{- end }}
- { name: OTEL_METRICS_EXPORTER, value: {{ join "," $metrics | default "none" | quote }} }
{{- if $v.telemetry.otlpEndpoint }}
- { name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ $v.telemetry.otlpEndpoint | quote }} }
{{- end }}
- name: K8S_POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: OTEL_RESOURCE_ATTRIBUTES
  value: {{ printf "k8s.namespace.name=%s,k8s.pod.name=$(K8S_POD_NAME),k8s.deployment.name=%s" .Release.Namespace (include "headrace.name" .) }}
{{- $own := fromYamlArray (include "headrace.ownNames" .) }}
{{- range $name, $value := merge (dict) $v.env $v.telemetry.env }}
{{- if has $name $own }}
{{- fail (printf "%s is set by another value of the chart: see values.yaml" $name) }}
{{- end }}
{{- /* toJson: a number of a values file is a float here, which quote alone would write as 1e+08. */}}
- { name: {{ $name }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }} }
{{- end }}
{{- end }}

{{- define "headrace.ownNames" -}}
- HEADRACE_LISTEN
- HEADRACE_INSECURE
- HEADRACE_HEALTH_LISTEN
- HEADRACE_DRAIN_TIMEOUT
- HEADRACE_MAX_CONNECTION_AGE
- HEADRACE_MODEL
- HEADRACE_TLS_CERT
- HEADRACE_TLS_KEY
- HEADRACE_TLS_CLIENT_CA
- HEADRACE_AUTH_FILE
- HEADRACE_OPENAI
- HEADRACE_OPENAI_HOST
- OTEL_EXPORTER_PROMETHEUS_HOST
- OTEL_EXPORTER_PROMETHEUS_PORT
- OTEL_METRICS_EXPORTER
- OTEL_EXPORTER_OTLP_ENDPOINT
- OTEL_RESOURCE_ATTRIBUTES
{{- end }}
