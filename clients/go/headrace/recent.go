package headrace

import "container/list"

// recent is a map that forgets what was not put for longest.
type recent[V any] struct {
	entries map[string]*list.Element
	order   list.List // the oldest first
}

type recentEntry[V any] struct {
	key   string
	value V
}

func (r *recent[V]) get(key string) (value V, known bool) {
	found, known := r.entries[key]
	if !known {
		return value, false
	}
	return found.Value.(recentEntry[V]).value, true
}

// put keeps a value, and forgets the oldest one beyond so many.
func (r *recent[V]) put(key string, value V, most int) {
	if r.entries == nil {
		r.entries = make(map[string]*list.Element)
	}
	if old, known := r.entries[key]; known {
		r.order.Remove(old)
	}
	r.entries[key] = r.order.PushBack(recentEntry[V]{key, value})
	if len(r.entries) > most {
		oldest := r.order.Front()
		r.order.Remove(oldest)
		delete(r.entries, oldest.Value.(recentEntry[V]).key)
	}
}
