// The definitions of cert-manager's kinds, which the chart's tests read; nothing of it is built.
module plimsoll.dev/suite/chart/cert-manager

go 1.26.0

require github.com/cert-manager/cert-manager v1.21.2
