//! What a message needs of its server: the fields and values that the contract marks with a capability. prost has no
//! reflection, so the generated table of marks is followed through the message's bytes.

use std::collections::BTreeSet;

use prost::Message;

/// A field of a message that needs a capability, or has values or messages that do.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) field: u32,
    /// What it needs by itself; empty: nothing.
    pub(crate) capability: &'static str,
    /// What its enum's values need.
    pub(crate) values: &'static [(i32, &'static str)],
    /// The marks of its message.
    pub(crate) inner: &'static [Mark],
}

mod marks {
    #![allow(dead_code)] // not each message is asked for
    include!("proto/marks.rs");
}

pub(crate) use marks::*;

/// The capabilities that a message needs, with those that its sender named: sorted, each once.
pub(crate) fn required_by(message: &impl Message, marks: &'static [Mark], named: &[&str]) -> Vec<String> {
    let mut found = named.iter().copied().collect();
    collect(&message.encode_to_vec(), marks, &mut found);
    found.into_iter().map(str::to_owned).collect()
}

fn collect(mut bytes: &[u8], marks: &'static [Mark], found: &mut BTreeSet<&str>) {
    while let Some((field, value, rest)) = field(bytes) {
        bytes = rest;
        let Some(mark) = marks.iter().find(|mark| mark.field == field) else { continue };
        if !mark.capability.is_empty() {
            found.insert(mark.capability);
        }
        match value {
            Value::Bytes(inner) => collect(inner, mark.inner, found),
            Value::Number(number) => {
                found.extend(
                    mark.values
                        .iter()
                        .filter(|(value, _)| i64::from(*value).cast_unsigned() == number)
                        .map(|(_, name)| *name),
                );
            }
        }
    }
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The first field of a message's bytes: its number, its value, and the rest. What was just encoded is well formed.
fn field(bytes: &[u8]) -> Option<(u32, Value<'_>, &[u8])> {
    let (key, rest) = varint(bytes)?;
    let number = u32::try_from(key >> 3).ok()?;
    let (value, rest) = match key & 7 {
        0 => varint(rest).map(|(value, rest)| (Value::Number(value), rest))?,
        1 => (Value::Bytes(&[]), rest.get(8..)?),
        5 => (Value::Bytes(&[]), rest.get(4..)?),
        _ => {
            let (size, rest) = varint(rest)?;
            let (value, rest) = rest.split_at_checked(usize::try_from(size).ok()?)?;
            (Value::Bytes(value), rest)
        }
    };
    Some((number, value, rest))
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (place, byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[place + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto;
    use crate::{Format, Message as Turn, Request, Tool};

    #[test]
    fn what_is_set_is_listed_sorted_and_once() {
        let spec = Request::chat([Turn::user("a"), Turn::user("b")])
            .tools([Tool::new("f")])
            .priority(3)
            .format(Format::StructuralTag("{}".into()))
            .build()
            .unwrap();
        let message = proto::GenerateRequest { spec: Some(spec), ..Default::default() };
        let found = required_by(&message, GENERATE_REQUEST, &["zeal", "chat"]);
        assert_eq!(found, ["chat", "priorities", "structural_tag", "structured_output", "tools", "zeal"]);
    }

    #[test]
    fn a_plain_request_needs_nothing() {
        let spec = Request::text("a").max_tokens(3).seed(1 << 60).temperature(0.5).build().unwrap();
        assert_eq!(required_by(&spec, GENERATION_SPEC, &[]), [""; 0]);
    }
}
