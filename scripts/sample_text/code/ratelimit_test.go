package ratelimit

import (
	"sync"
	"testing"
	"time"
)

// Bucket lets through Rate events a second on average, and Burst at once.
type Bucket struct {
	Rate  float64
	Burst float64

	mu     sync.Mutex
	tokens float64
	last   time.Time
	now    func() time.Time
}

// New returns a full bucket.
func New(rate, burst float64) *Bucket {
	return &Bucket{Rate: rate, Burst: burst, tokens: burst, last: time.Now(), now: time.Now}
}

// Allow takes a token if there is one.
func (b *Bucket) Allow() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	b.tokens = min(b.Burst, b.tokens+now.Sub(b.last).Seconds()*b.Rate)
	b.last = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

type clock struct{ time time.Time }

func (c *clock) Now() time.Time          { return c.time }
func (c *clock) Advance(d time.Duration) { c.time = c.time.Add(d) }

func newAt(rate, burst float64) (*Bucket, *clock) {
	c := &clock{time: time.Unix(1_700_000_000, 0)}
	b := New(rate, burst)
	b.now, b.last = c.Now, c.time
	return b, c
}

func TestBurst(t *testing.T) {
	b, _ := newAt(1, 3)
	for i := 0; i < 3; i++ {
		if !b.Allow() {
			t.Fatalf("event %d of the burst was refused", i)
		}
	}
	if b.Allow() {
		t.Fatal("an event past the burst was let through")
	}
}

func TestRefill(t *testing.T) {
	tests := []struct {
		name string
		wait time.Duration
		want int
	}{
		{"nothing yet", 100 * time.Millisecond, 0},
		{"one token", 500 * time.Millisecond, 1},
		{"two tokens", time.Second, 2},
		{"no more than the burst", time.Hour, 4},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b, c := newAt(2, 4)
			for b.Allow() {
			}
			c.Advance(tt.wait)
			got := 0
			for b.Allow() {
				got++
			}
			if got != tt.want {
				t.Errorf("after %v: %d events, want %d", tt.wait, got, tt.want)
			}
		})
	}
}

func BenchmarkAllow(b *testing.B) {
	bucket := New(1e9, 1e9)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			bucket.Allow()
		}
	})
}
