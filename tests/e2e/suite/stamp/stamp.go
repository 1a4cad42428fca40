// Package stamp encodes the time of a measurement in an amount of memory, so that a reader of the amount can compute its age to the
// millisecond. The amount is plausible as a node's memory in use: 16 GiB, and up to a gigabyte for the time.
package stamp

import (
	"fmt"
	"time"
)

const (
	base = 16 << 30 // bytes
	// A byte is a millisecond: the amounts repeat after eleven days.
	period = 1_000_000_000
)

// Of is the amount, in bytes, that was measured at this time.
func Of(t time.Time) int64 { return base + t.UnixMilli()%period }

// Expression is the amount that is measured now, in kwok's dialect of CEL.
var Expression = fmt.Sprintf("%d + int(UnixSecond(Now()) * 1000.0) %% %d", base, period)

// Age is how long before now an amount was measured; it is negative if that was later.
func Age(amount int64, now time.Time) (time.Duration, error) {
	if amount < base || amount >= base+period {
		return 0, fmt.Errorf("%d bytes do not encode a time", amount)
	}
	elapsed := (Of(now) - amount + period) % period
	if elapsed > period/2 {
		elapsed -= period
	}
	return time.Duration(elapsed) * time.Millisecond, nil
}
