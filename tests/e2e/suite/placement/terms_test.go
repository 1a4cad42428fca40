//go:build e2e

package placement

import (
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// headroom is the intended score of a node: 0 at 100, the same for all loads up to 60, and without a load the one of 80.
func headroom(load string) int64 {
	percent, err := strconv.Atoi(load)
	if err != nil || strconv.Itoa(percent) != load || percent%5 != 0 || percent < 0 || percent > 100 {
		percent = 80
	}
	return min(8, 20-int64(percent)/5)
}

// TestTermsSumUpToTheHeadroom evaluates the chart's terms as a scheduler does, for all loads, and for labels that agents do not write.
func TestTermsSumUpToTheHeadroom(t *testing.T) {
	terms, err := nodeaffinity.NewPreferredSchedulingTerms(addedAffinity(t, renderedConfig(t)))
	if err != nil {
		t.Fatal(err)
	}
	loads := []string{none, "", "abc", "-", "007", "05", "00", "0.5", "1e1", "5_0", "7", "61", "99", "101", "105", "1000"}
	for load := range 101 {
		if load%5 == 0 {
			loads = append(loads, strconv.Itoa(load))
		}
	}
	for _, load := range loads {
		labels := map[string]string{"other": "label"}
		if load != none {
			labels[loadLabel] = load
		}
		found := terms.Score(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "it", Labels: labels}})
		if wanted := headroom(load); found != wanted {
			t.Errorf("load %q: the sum of the matching terms is %d, not %d", load, found, wanted)
		}
	}
}
