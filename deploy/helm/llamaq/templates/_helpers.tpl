{{- define "llamaq.name" -}}
{{ printf "%s-%s" .Release.Name "llamaq" | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "llamaq.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "llamaq.selector" . }}
{{- end }}

{{- define "llamaq.selector" -}}
app.kubernetes.io/name: llamaq
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "llamaq.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "llamaq.urlSecret" -}}
{{- if and .Values.redis.url .Values.redis.existingSecret }}
{{- fail "set either redis.url or redis.existingSecret, not both" }}
{{- else if .Values.redis.existingSecret }}
{{- .Values.redis.existingSecret }}
{{- else if .Values.redis.url }}
{{- include "llamaq.name" . }}-redis
{{- else }}
{{- fail "set redis.existingSecret (a Secret with the key `url`) or redis.url" }}
{{- end }}
{{- end }}

{{/* The environment that workers and the other containers share: Redis and the queue. */}}
{{- define "llamaq.env" -}}
- name: LLAMAQ_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "llamaq.urlSecret" . }}
      key: {{ empty .Values.redis.existingSecret | ternary "url" .Values.redis.existingSecretKey }}
- name: LLAMAQ_QUEUE
  value: {{ .Values.queue | quote }}
- name: LLAMAQ_KEY_PREFIX
  value: {{ .Values.keyPrefix | quote }}
- name: LLAMAQ_PARTITIONS
  value: {{ .Values.partitions | quote }}
{{- end }}

{{- define "llamaq.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "llamaq.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "llamaq.caMount" -}}
{{- if .Values.redis.caSecret }}
- name: redis-ca
  mountPath: /etc/llamaq/redis
  readOnly: true
{{- end }}
{{- end }}

{{- define "llamaq.caVolume" -}}
{{- if .Values.redis.caSecret }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.caSecret }}
    items:
      - key: ca.crt
        path: ca.crt
{{- end }}
{{- end }}

{{/* KEDA scales pods. A pod has a worker with n_parallel slots for each of `devices`, such as "0,1". */}}
{{- define "llamaq.jobsPerPod" -}}
{{- $workers := .Values.worker.settings.devices | default "0" | toString | splitList "," | len }}
{{- .Values.keda.jobsPerWorker | default .Values.worker.settings.n_parallel | mul $workers }}
{{- end }}

{{/* Settings by their names as environment variables. toJson: Helm would write a million as 1e+06. */}}
{{- define "llamaq.settings" -}}
{{- range $name, $value := . }}
- name: LLAMAQ_{{ upper $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}
