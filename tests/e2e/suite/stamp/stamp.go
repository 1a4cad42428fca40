// Package stamp encodes the time of a measurement in an amount of memory, so that a reader of the amount can compute its age, to the
// millisecond. It looks like the memory in use of a node: 16 GiB, and what of a gigabyte the time makes.
package stamp

import (
	"fmt"
	"time"
)

const (
	least = 16 << 30 // bytes
	// A byte is a millisecond: the same amount comes again after eleven days.
	period = 1_000_000_000
)

// Of is the amount, in bytes, that was measured at this time.
func Of(t time.Time) int64 { return least + t.UnixMilli()%period }

// Expression is the same in kwok's dialect of CEL: the amount that is measured now.
var Expression = fmt.Sprintf("%d + int(UnixSecond(Now()) * 1000.0) %% %d", least, period)

// Age is how long before now an amount was measured; negative where it was later.
func Age(amount int64, now time.Time) (time.Duration, error) {
	if amount < least || amount >= least+period {
		return 0, fmt.Errorf("%d bytes do not encode a time", amount)
	}
	elapsed := (Of(now) - amount + period) % period
	if elapsed > period/2 {
		elapsed -= period
	}
	return time.Duration(elapsed) * time.Millisecond, nil
}
