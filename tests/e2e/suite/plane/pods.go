//go:build e2e

package plane

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// IsReady reports whether a pod is ready and not terminating.
func IsReady(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && slices.ContainsFunc(pod.Status.Conditions, func(condition corev1.PodCondition) bool {
		return condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue
	})
}
