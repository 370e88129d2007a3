//! Which server a request goes to. docs/fleet.md tells these rules exactly, for clients in all languages.

use ring::digest;

use crate::proto;
use crate::proto::chat_message::ContentKind;
use crate::proto::content_part::Part;
use crate::proto::generation_spec::Input;
use crate::recent::Recent;

const HEAD_BYTES: usize = 1024;
const HEAD_TOKENS: usize = 256;
const CHAT_BYTES: usize = 4096;
const LEAST_BYTES: usize = 256;
const LEAST_TOKENS: usize = 64;
const REMEMBERED: usize = 4096;

type Digest = [u8; 8];

/// The keys of a prompt: shared decides the order of servers, own is what is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixKeys {
    shared: Digest,
    own: Digest,
}

fn hash(parts: &[&[u8]]) -> Digest {
    let mut context = digest::Context::new(&digest::SHA256);
    parts.iter().for_each(|part| context.update(part));
    let mut first = [0; 8];
    first.copy_from_slice(&context.finish().as_ref()[..8]);
    first
}

/// The keys of a request's prompt; none: it has no prefix that is worth a preference.
pub(crate) fn keys_of(spec: &proto::GenerationSpec) -> Option<PrefixKeys> {
    let cache = spec.cache.as_ref();
    if cache.is_some_and(|cache| cache.bypass_prefix_cache) {
        return None;
    }
    let salt = cache.map_or("", |cache| &cache.salt).as_bytes();
    let of = |head: &[u8]| {
        let key = hash(&[salt, &[0], head]);
        Some(PrefixKeys { shared: key, own: key })
    };
    match spec.input.as_ref()? {
        Input::Text(input) if input.text.len().min(HEAD_BYTES) < LEAST_BYTES => None,
        Input::Text(input) => of(&input.text.as_bytes()[..input.text.len().min(HEAD_BYTES)]),
        Input::Tokens(input) if input.ids.len() < LEAST_TOKENS => None,
        Input::Tokens(input) => {
            let head: Vec<u8> = input.ids.iter().take(HEAD_TOKENS).flat_map(|id| id.to_be_bytes()).collect();
            of(&head)
        }
        Input::Chat(chat) => Some(chat_keys(salt, chat)),
    }
}

fn chat_keys(salt: &[u8], chat: &proto::ChatInput) -> PrefixKeys {
    let mut head = Vec::new();
    for tool in &chat.tools {
        let description = tool.description.as_deref().unwrap_or_default();
        for text in [&tool.definition_json, &tool.name, description, &tool.parameters_json] {
            head.extend_from_slice(text.as_bytes());
            head.push(0);
        }
    }
    let instructs = |message: &&proto::ChatMessage| {
        message.role == i32::from(proto::ChatRole::System) || message.role == i32::from(proto::ChatRole::Developer)
    };
    let opening = chat.messages.iter().take_while(instructs).count();
    for message in &chat.messages[..opening] {
        head.extend(key_text(message));
    }
    head.truncate(CHAT_BYTES);
    let mut first = chat.messages.get(opening).map(key_text).unwrap_or_default();
    first.truncate(CHAT_BYTES);
    let own = hash(&[salt, &[0], &head, &[0], &first]);
    let shared = if head.len() < LEAST_BYTES { own } else { hash(&[salt, &[0], &head]) };
    PrefixKeys { shared, own }
}

fn key_text(message: &proto::ChatMessage) -> Vec<u8> {
    let mut text = message.role.to_string().into_bytes();
    text.push(0);
    match &message.content_kind {
        Some(ContentKind::Content(content)) => text.extend_from_slice(content.as_bytes()),
        Some(ContentKind::ContentParts(parts)) => {
            for part in &parts.parts {
                if let Some(Part::Text(part)) = &part.part {
                    text.extend_from_slice(part.as_bytes());
                }
            }
        }
        None => {}
    }
    text.push(0);
    text
}

/// A server to choose: name is its instance, by which all clients know it; turn is when it was chosen last.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) name: String,
    pub(crate) load: u64,
    pub(crate) capacity: u64,
    pub(crate) turn: u64,
}

/// A key's order of preference among servers: indices.
fn rendezvous(key: &Digest, candidates: &[Candidate]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    let rank = |&index: &usize| {
        let name = &candidates[index].name;
        std::cmp::Reverse((hash(&[key, name.as_bytes()]), name.clone()))
    };
    order.sort_by_cached_key(rank);
    order
}

/// Chooses servers, and remembers where prefixes went.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    homes: Recent,
}

impl Placement {
    /// The index of the server for a request; there is a candidate, and no two have the same name.
    pub(crate) fn choose(&mut self, keys: Option<&PrefixKeys>, candidates: &[Candidate]) -> usize {
        let Some(keys) = keys else { return least_loaded(candidates) };
        let own: String = keys.own.iter().map(|byte| format!("{byte:02x}")).collect();
        let chosen = if candidates.len() > 1 { self.within_bounds(keys, &own, candidates) } else { 0 };
        self.homes.put(&own, &candidates[chosen].name, REMEMBERED);
        chosen
    }

    fn within_bounds(&self, keys: &PrefixKeys, own: &str, candidates: &[Candidate]) -> usize {
        let total: u64 = candidates.iter().map(|one| one.load).sum::<u64>() + 1;
        let room: u64 = candidates.iter().map(|one| one.capacity).sum();
        let someone_is_free = candidates.iter().any(|one| one.load < one.capacity);
        let home = self.homes.get(own).and_then(|home| candidates.iter().position(|one| one.name == home));
        let order = home.into_iter().chain(rendezvous(&keys.shared, candidates));
        // A prefix is not worth a wait where another server would begin at once.
        let fits = |&index: &usize| {
            let one = &candidates[index];
            let bound = (5 * total * one.capacity).div_ceil(4 * room) + 1; // 1.25 of its share
            one.load < bound && (one.load < one.capacity || !someone_is_free)
        };
        order.into_iter().find(fits).unwrap_or_else(|| least_loaded(candidates))
    }
}

fn least_loaded(candidates: &[Candidate]) -> usize {
    let by_load = |&a: &usize, &b: &usize| {
        let (a, b) = (&candidates[a], &candidates[b]);
        (a.load * b.capacity).cmp(&(b.load * a.capacity)).then(a.turn.cmp(&b.turn))
    };
    (0..candidates.len()).min_by(by_load).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Message, Request};

    fn hex(digest: Digest) -> String {
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn keys(request: Request) -> Option<PrefixKeys> {
        keys_of(&request.build().unwrap())
    }

    fn servers(loads: &[(&str, u64)]) -> Vec<Candidate> {
        loads.iter().map(|&(name, load)| Candidate { name: name.into(), load, capacity: 8, turn: 0 }).collect()
    }

    #[test]
    fn the_documents_vectors() {
        let text = keys(Request::text("a".repeat(2000))).unwrap();
        assert_eq!(hex(text.shared), "e57e1cdbf524ce1c");
        assert_eq!(text.shared, text.own);
        let candidates = servers(&[("c", 0), ("a", 0), ("b", 0)]);
        let order: Vec<_> =
            rendezvous(&text.shared, &candidates).iter().map(|&at| candidates[at].name.clone()).collect();
        assert_eq!(order, ["a", "b", "c"]);
        let ids = keys(Request::tokens((0..300).collect::<Vec<_>>())).unwrap();
        assert_eq!(hex(ids.shared), "844d4a050671a7ca");
        let chat = keys(Request::chat([Message::system("s".repeat(300)), Message::user("hi")])).unwrap();
        assert_eq!((hex(chat.shared), hex(chat.own)), ("923bf3b05a357e08".into(), "9acc8f49988cc8c1".into()));
    }

    #[test]
    fn short_prompts_have_no_key() {
        assert_eq!(keys(Request::text("a".repeat(255))), None);
        assert_eq!(keys(Request::tokens(vec![1; 63])), None);
        assert_eq!(keys(Request::text("a".repeat(2000)).bypass_prefix_cache(true)), None);
    }

    #[test]
    fn a_prefix_stays_where_it_went_within_the_bound() {
        let keys = keys(Request::text("a".repeat(2000))).unwrap();
        let mut placement = Placement::default();
        let at = |placement: &mut Placement, loads: &[(&str, u64)]| {
            let candidates = servers(loads);
            candidates[placement.choose(Some(&keys), &candidates)].name.clone()
        };
        assert_eq!(at(&mut placement, &[("a", 0), ("b", 0), ("c", 0)]), "a");
        assert_eq!(at(&mut placement, &[("a", 8), ("b", 1), ("c", 1)]), "b");
        assert_eq!(at(&mut placement, &[("a", 0), ("b", 1), ("c", 1)]), "b");
        assert_eq!(placement.choose(None, &servers(&[("a", 3), ("b", 1)])), 1);
    }
}
