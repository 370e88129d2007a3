package headrace

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"
	"strconv"
	"strings"

	headracev1 "headrace.dev/go/headrace/v1"
)

// docs/fleet.md tells these rules exactly, for clients in all languages.
const (
	boundFactor  = 1.25
	headBytes    = 1024
	headTokens   = 256
	chatBytes    = 4096
	leastBytes   = 256
	leastTokens  = 64
	rememberedIn = 4096
)

// prefixKeys are the keys of a prompt: shared decides the order of servers, own is what is remembered.
type prefixKeys struct{ shared, own string }

// keysOf makes the keys of a request's prompt; nil: it has no prefix that is worth a preference.
func keysOf(spec *headracev1.GenerationSpec) *prefixKeys {
	if spec.GetCache().GetBypassPrefixCache() {
		return nil
	}
	salt := append([]byte(spec.GetCache().GetSalt()), 0)
	var head []byte
	switch input := spec.GetInput().(type) {
	case *headracev1.GenerationSpec_Text:
		text := input.Text.GetText()
		head = []byte(text[:min(len(text), headBytes)])
		if len(head) < leastBytes {
			return nil
		}
	case *headracev1.GenerationSpec_Tokens:
		ids := input.Tokens.GetIds()
		if len(ids) < leastTokens {
			return nil
		}
		for _, id := range ids[:min(len(ids), headTokens)] {
			head = binary.BigEndian.AppendUint32(head, id)
		}
	case *headracev1.GenerationSpec_Chat:
		return chatKeys(salt, input.Chat)
	default:
		return nil
	}
	key := digest(append(salt, head...))
	return &prefixKeys{key, key}
}

func chatKeys(salt []byte, chat *headracev1.ChatInput) *prefixKeys {
	var head bytes.Buffer
	for _, tool := range chat.GetTools() {
		for _, text := range []string{tool.GetDefinitionJson(), tool.GetName(), tool.GetDescription(), tool.GetParametersJson()} {
			head.WriteString(text)
			head.WriteByte(0)
		}
	}
	opening := slices.IndexFunc(chat.GetMessages(), func(m *headracev1.ChatMessage) bool {
		return m.GetRole() != headracev1.ChatRole_CHAT_ROLE_SYSTEM && m.GetRole() != headracev1.ChatRole_CHAT_ROLE_DEVELOPER
	})
	first := ""
	if opening < 0 {
		opening = len(chat.GetMessages())
	} else {
		first = keyText(chat.GetMessages()[opening])
	}
	for _, message := range chat.GetMessages()[:opening] {
		head.WriteString(keyText(message))
	}
	head.Truncate(min(head.Len(), chatBytes))
	shared := append(salt, head.Bytes()...)
	own := append(slices.Clone(shared), 0)
	own = append(own, first[:min(len(first), chatBytes)]...)
	keys := &prefixKeys{shared: digest(shared), own: digest(own)}
	if head.Len() < leastBytes {
		keys.shared = keys.own
	}
	return keys
}

func keyText(message *headracev1.ChatMessage) string {
	var text strings.Builder
	text.WriteString(strconv.Itoa(int(message.GetRole())))
	text.WriteByte(0)
	text.WriteString(message.GetContent())
	for _, part := range message.GetContentParts().GetParts() {
		text.WriteString(part.GetText())
	}
	text.WriteByte(0)
	return text.String()
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return string(sum[:8])
}

// A candidate is a server to choose: name is its instance, by which all clients know it; turn is when it was chosen last.
type candidate struct {
	name           string
	load, capacity int
	turn           int
}

// rendezvous is a key's order of preference among servers.
func rendezvous(key string, candidates []candidate) []candidate {
	ordered := slices.Clone(candidates)
	slices.SortFunc(ordered, func(a, b candidate) int {
		byDigest := cmp.Compare(digest([]byte(key+b.name)), digest([]byte(key+a.name)))
		return cmp.Or(byDigest, cmp.Compare(b.name, a.name))
	})
	return ordered
}

// A placement chooses servers, and remembers where prefixes went. Its user keeps calls apart.
type placement struct{ homes recent[string] }

// choose is the name of the server for a request; there is a candidate, and no two have the same name.
func (p *placement) choose(keys *prefixKeys, candidates []candidate) string {
	if keys == nil {
		return leastLoaded(candidates).name
	}
	chosen := candidates[0].name
	if len(candidates) > 1 {
		chosen = p.withinBounds(keys, candidates).name
	}
	p.homes.put(keys.own, chosen, rememberedIn)
	return chosen
}

func (p *placement) withinBounds(keys *prefixKeys, candidates []candidate) candidate {
	total, room, someoneIsFree := 1, 0, false
	for _, one := range candidates {
		total += one.load
		room += one.capacity
		someoneIsFree = someoneIsFree || one.load < one.capacity
	}
	ordered := rendezvous(keys.shared, candidates)
	if home, known := p.homes.get(keys.own); known {
		if at := slices.IndexFunc(ordered, func(one candidate) bool { return one.name == home }); at >= 0 {
			ordered = append([]candidate{ordered[at]}, ordered...)
		}
	}
	for _, one := range ordered {
		bound := int(math.Ceil(boundFactor*float64(total)*float64(one.capacity)/float64(room))) + 1
		// A prefix is not worth a wait where another server would begin at once.
		if one.load < bound && (one.load < one.capacity || !someoneIsFree) {
			return one
		}
	}
	return leastLoaded(candidates)
}

func leastLoaded(candidates []candidate) candidate {
	return slices.MinFunc(candidates, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.load*b.capacity, b.load*a.capacity), cmp.Compare(a.turn, b.turn))
	})
}
