module github.com/gocrane/crane-scheduler

go 1.17

require (
	k8s.io/api v0.23.3
	k8s.io/apimachinery v0.23.3
	k8s.io/klog/v2 v2.60.1
	k8s.io/kube-scheduler v0.23.3
	k8s.io/kubernetes v1.23.3
)
