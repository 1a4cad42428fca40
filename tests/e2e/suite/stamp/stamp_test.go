package stamp

import (
	"testing"
	"time"
)

func TestAmountEncodesItsAge(t *testing.T) {
	for _, now := range []time.Time{
		time.UnixMilli(1_800_000_123_456),
		// The amount begins again between the two.
		time.UnixMilli(1_800_000_000_004),
	} {
		for _, age := range []time.Duration{0, 9 * time.Millisecond, 16 * time.Second, -2 * time.Second} {
			if told, err := Age(Of(now.Add(-age)), now); told != age || err != nil {
				t.Errorf("what is %s old is told to be %s old: %v", age, told, err)
			}
		}
	}
}

func TestOtherAmountHasNoAge(t *testing.T) {
	for _, amount := range []int64{0, 16<<30 - 1, 32 << 30} {
		if age, err := Age(amount, time.Now()); err == nil {
			t.Errorf("%d bytes are told to be %s old", amount, age)
		}
	}
}
