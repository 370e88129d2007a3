package headrace

import (
	"encoding/hex"
	"strings"
	"testing"

	headracev1 "headrace.dev/go/headrace/v1"
)

func TestKeysAndOrderAreThoseOfAllClients(t *testing.T) {
	text := &headracev1.GenerationSpec{Input: &headracev1.GenerationSpec_Text{Text: &headracev1.TextInput{Text: strings.Repeat("a", 2000)}}}
	ids := &headracev1.TokenInput{}
	for id := range uint32(300) {
		ids.Ids = append(ids.Ids, id)
	}
	tokens := &headracev1.GenerationSpec{Input: &headracev1.GenerationSpec_Tokens{Tokens: ids}}
	talk := &headracev1.GenerationSpec{Input: &headracev1.GenerationSpec_Chat{Chat: &headracev1.ChatInput{Messages: []*headracev1.ChatMessage{
		{Role: headracev1.ChatRole_CHAT_ROLE_SYSTEM, ContentKind: &headracev1.ChatMessage_Content{Content: strings.Repeat("s", 300)}},
		{Role: headracev1.ChatRole_CHAT_ROLE_USER, ContentKind: &headracev1.ChatMessage_Content{Content: "hi"}},
	}}}}
	for _, one := range []struct {
		spec        *headracev1.GenerationSpec
		shared, own string
	}{
		{text, "e57e1cdbf524ce1c", "e57e1cdbf524ce1c"},
		{tokens, "844d4a050671a7ca", "844d4a050671a7ca"},
		{talk, "923bf3b05a357e08", "9acc8f49988cc8c1"},
	} {
		keys := keysOf(one.spec)
		if got := hex.EncodeToString([]byte(keys.shared)); got != one.shared {
			t.Errorf("shared %s, want %s", got, one.shared)
		}
		if got := hex.EncodeToString([]byte(keys.own)); got != one.own {
			t.Errorf("own %s, want %s", got, one.own)
		}
	}
	var names string
	for _, one := range rendezvous(keysOf(text).shared, []candidate{{name: "c"}, {name: "a"}, {name: "b"}}) {
		names += one.name
	}
	if names != "abc" {
		t.Errorf("ordered %s", names)
	}
	short := &headracev1.GenerationSpec{Input: &headracev1.GenerationSpec_Text{Text: &headracev1.TextInput{Text: "short"}}}
	if keysOf(short) != nil {
		t.Error("a short text has keys")
	}
}

func TestAPrefixStaysWithinItsBound(t *testing.T) {
	var p placement
	keys := &prefixKeys{"k", "k"}
	idle := []candidate{{name: "a", capacity: 4}, {name: "b", capacity: 4}}
	home := p.choose(keys, idle)
	other := "a"
	if home == "a" {
		other = "b"
	}
	busy := []candidate{{name: home, load: 4, capacity: 4}, {name: other, capacity: 4}}
	if got := p.choose(keys, busy); got != other {
		t.Errorf("went to %s, which has no free place", got)
	}
	if got := p.choose(keys, idle); got != other {
		t.Errorf("moved back to %s", got)
	}
	if got := p.choose(nil, []candidate{{name: "a", load: 1, capacity: 4, turn: 1}, {name: "b", load: 1, capacity: 8, turn: 2}}); got != "b" {
		t.Errorf("the least loaded is not %s", got)
	}
}

func TestABudgetEndsStorms(t *testing.T) {
	b := budget{budgetTokens}
	allowed := 0
	for range 200 {
		if b.failed() {
			allowed++
		}
	}
	if allowed != 49 {
		t.Errorf("%d were allowed at once", allowed)
	}
	for range 600 {
		b.succeeded()
	}
	if !b.failed() {
		t.Error("successes give nothing back")
	}
}

func TestTargets(t *testing.T) {
	for target, want := range map[string]string{
		"host":                  "host:50051",
		"host:1":                "host:1",
		"[::1]":                 "[::1]:50051",
		"/run/x.sock":           "unix:/run/x.sock",
		"dns:///name":           "dns:///name:50051",
		"a:1, b:2,a:1":          "a:1 b:2",
		"unix:/a,unix:/b":       "unix:/a unix:/b",
		"http://host":           "",
		"":                      "",
		"dns:///name:port":      "",
		"dns:host:1":            "dns:host:1",
		"passthrough:///host:1": "passthrough:///host:1",
	} {
		places, err := parseTarget(target)
		var got []string
		for _, one := range places {
			got = append(got, one.String())
		}
		if (err != nil) != (want == "") || strings.Join(got, " ") != want && err == nil {
			t.Errorf("%q: %v, %v", target, got, err)
		}
	}
}
