//! A map that forgets what was not put for longest.

use std::collections::{BTreeMap, HashMap};

#[derive(Debug, Default)]
pub(crate) struct Recent {
    entries: HashMap<String, (u64, String)>,
    order: BTreeMap<u64, String>,
    last: u64,
}

impl Recent {
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.entries.get(key).map(|(_, value)| value.as_str())
    }

    /// Keeps a value, and forgets the oldest one beyond so many.
    pub(crate) fn put(&mut self, key: &str, value: &str, most: usize) {
        self.last += 1;
        if let Some((before, _)) = self.entries.insert(key.to_owned(), (self.last, value.to_owned())) {
            self.order.remove(&before);
        }
        self.order.insert(self.last, key.to_owned());
        if self.entries.len() > most
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.entries.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten() {
        let mut recent = Recent::default();
        for key in ["a", "b", "a", "c"] {
            recent.put(key, key, 2);
        }
        assert_eq!((recent.get("a"), recent.get("b"), recent.get("c")), (Some("a"), None, Some("c")));
    }
}
