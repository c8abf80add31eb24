// Command crawler walks the pages of one site and lists its broken links.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"regexp"
	"sort"
	"sync"
	"time"
)

var href = regexp.MustCompile(`href="([^"#]+)`)

// Result is what was found at an address.
type Result struct {
	URL    string
	Status int
	Err    error
	Links  []string
}

// Crawler visits each address once, with a fixed number of workers.
type Crawler struct {
	Client  *http.Client
	Workers int
	Host    string

	mu   sync.Mutex
	seen map[string]bool
}

// first reports whether the address has not been seen before, and marks it.
func (c *Crawler) first(address string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen[address] {
		return false
	}
	c.seen[address] = true
	return true
}

func (c *Crawler) visit(ctx context.Context, address string) Result {
	result := Result{URL: address}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		result.Err = err
		return result
	}
	response, err := c.Client.Do(request)
	if err != nil {
		result.Err = err
		return result
	}
	defer response.Body.Close()
	result.Status = response.StatusCode
	if response.StatusCode != http.StatusOK || response.Request.URL.Host != c.Host {
		return result
	}
	page, err := io.ReadAll(io.LimitReader(response.Body, 4<<20))
	if err != nil {
		result.Err = fmt.Errorf("reading %s: %w", address, err)
		return result
	}
	for _, found := range href.FindAllSubmatch(page, -1) {
		if link, err := response.Request.URL.Parse(string(found[1])); err == nil {
			result.Links = append(result.Links, link.String())
		}
	}
	return result
}

// Run crawls from a start until no page is left, or the context ends.
func (c *Crawler) Run(ctx context.Context, start string) []Result {
	c.seen = map[string]bool{}
	var (
		pending sync.WaitGroup
		mu      sync.Mutex
		results []Result
	)
	slots := make(chan struct{}, c.Workers)
	var crawl func(string)
	crawl = func(address string) {
		defer pending.Done()
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		result := c.visit(ctx, address)
		<-slots
		mu.Lock()
		results = append(results, result)
		mu.Unlock()
		for _, link := range result.Links {
			if c.first(link) {
				pending.Add(1)
				go crawl(link)
			}
		}
	}
	c.first(start)
	pending.Add(1)
	go crawl(start)
	pending.Wait()
	sort.Slice(results, func(i, j int) bool { return results[i].URL < results[j].URL })
	return results
}

func main() {
	workers := flag.Int("workers", 8, "pages fetched at a time")
	timeout := flag.Duration("timeout", 10*time.Second, "for each page")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: crawler [options] URL")
		os.Exit(2)
	}
	start, err := url.Parse(flag.Arg(0))
	if err != nil || start.Host == "" {
		fmt.Fprintln(os.Stderr, "crawler: not an address:", flag.Arg(0))
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	crawler := &Crawler{Client: &http.Client{Timeout: *timeout}, Workers: *workers, Host: start.Host}
	broken := 0
	for _, result := range crawler.Run(ctx, start.String()) {
		switch {
		case errors.Is(result.Err, context.Canceled):
		case result.Err != nil:
			fmt.Printf("failed  %s  %v\n", result.URL, result.Err)
			broken++
		case result.Status >= 400:
			fmt.Printf("%d     %s\n", result.Status, result.URL)
			broken++
		}
	}
	if broken > 0 {
		os.Exit(1)
	}
}
