package headrace

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const defaultPort = "50051"

// A place is what a part of a target names: one server's address, or a name each of whose addresses is a server.
type place struct {
	address string // as gRPC's names have it: host:port, unix:/path, …; empty: a name
	host    string
	port    string
}

// An address is where one server is.
type address struct {
	target     string // what it is called: host:port, unix:/path, ipv4:…, ipv6:…
	serverName string // the name on its certificate, where the address is what a name resolved to; else empty
}

// dialTarget is the address as grpc-go takes it, which has no ipv4: and ipv6:.
func (a address) dialTarget() string {
	for _, scheme := range []string{"ipv4:", "ipv6:"} {
		if rest, ok := strings.CutPrefix(a.target, scheme); ok {
			return "passthrough:///" + rest
		}
	}
	return a.target
}

// parseTarget reads a target: addresses and names, with commas between them; each place once.
func parseTarget(target string) ([]place, error) {
	var places []place
	for text := range strings.SplitSeq(target, ",") {
		one, err := parsePlace(strings.TrimSpace(text))
		if err != nil {
			return nil, err
		}
		if !slices.Contains(places, one) {
			places = append(places, one)
		}
	}
	return places, nil
}

var (
	hostOnly = regexp.MustCompile(`^([^:\[\]]+|\[[0-9A-Fa-f:.%]+\])$`)
	schemes  = []string{"unix:", "unix-abstract:", "ipv4:", "ipv6:", "passthrough:"}
	urls     = []string{"http://", "https://", "grpc://", "grpcs://"}
)

func parsePlace(text string) (place, error) {
	hasPrefix := func(prefix string) bool { return strings.HasPrefix(text, prefix) }
	switch {
	case text == "":
		return place{}, fmt.Errorf("headrace: the target is empty; use host:port, dns:///host:port or unix:/path")
	case slices.ContainsFunc(urls, hasPrefix):
		return place{}, fmt.Errorf("headrace: %q is a URL; use host:port, dns:///host:port or unix:/path, "+
			"and WithTLS if the server is encrypted", text)
	case hasPrefix("/"), hasPrefix("./"):
		return place{address: "unix:" + text}, nil
	case slices.ContainsFunc(schemes, hasPrefix):
		return place{address: text}, nil
	case hasPrefix("dns:///"):
		name := withPort(strings.TrimPrefix(text, "dns:///"))
		host, port, err := net.SplitHostPort(name)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil || host == "" {
			return place{}, fmt.Errorf("headrace: %q: a name and a port are needed, as in dns:///headrace:50051", text)
		}
		return place{host: host, port: port}, nil
	case hasPrefix("dns:"):
		return place{address: text}, nil
	}
	return place{address: withPort(text)}, nil
}

func withPort(name string) string {
	if hostOnly.MatchString(name) {
		return name + ":" + defaultPort
	}
	return name
}

// isLocal tells whether a place is on this machine: a Unix socket or a loopback address.
func (p place) isLocal() bool {
	if strings.HasPrefix(p.address, "unix") {
		return true
	}
	host := p.host
	if host == "" {
		name := strings.TrimPrefix(strings.TrimPrefix(p.address, "ipv4:"), "ipv6:")
		host, _, _ = net.SplitHostPort(strings.TrimPrefix(name, "passthrough:///"))
	}
	parsed, err := netip.ParseAddr(host)
	return host == "localhost" || (err == nil && parsed.IsLoopback())
}

// String is the place as a user writes it.
func (p place) String() string {
	if p.address != "" {
		return p.address
	}
	return "dns:///" + net.JoinHostPort(p.host, p.port)
}

// resolve looks a name up: the addresses that it has now.
func (p place) resolve(ctx context.Context) ([]address, error) {
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", p.host)
	if err != nil {
		return nil, err
	}
	var addresses []address
	for _, ip := range found {
		ip = ip.Unmap()
		scheme := "ipv6:"
		if ip.Is4() {
			scheme = "ipv4:"
		}
		one := address{target: scheme + net.JoinHostPort(ip.String(), p.port), serverName: p.host}
		if !slices.Contains(addresses, one) {
			addresses = append(addresses, one)
		}
	}
	return addresses, nil
}
