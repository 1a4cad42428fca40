package stamp

import (
	"testing"
	"time"
)

func TestAmountEncodesItsAge(t *testing.T) {
	for _, now := range []time.Time{
		time.UnixMilli(1_800_000_123_456),
		// The amounts start again shortly before this time.
		time.UnixMilli(1_800_000_000_004),
	} {
		for _, age := range []time.Duration{0, 9 * time.Millisecond, 16 * time.Second, -2 * time.Second} {
			if got, err := Age(Of(now.Add(-age)), now); got != age || err != nil {
				t.Errorf("the age %s is decoded as %s: %v", age, got, err)
			}
		}
	}
}

func TestOtherAmountHasNoAge(t *testing.T) {
	for _, amount := range []int64{0, 16<<30 - 1, 32 << 30} {
		if age, err := Age(amount, time.Now()); err == nil {
			t.Errorf("%d bytes are decoded as %s old", amount, age)
		}
	}
}
