//! Makes the library's code of the contract: `generate DESCRIPTORS FOLDER` reads a descriptor set, and writes the
//! messages and stubs of `headrace.v1` and `google.rpc`, and `marks.rs`: what needs which capability.
//!
//! The descriptor set comes from buf, so nobody needs protoc. `scripts/generate-rust.sh` runs this.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use prost::Message;

/// The options of the contract, which prost's own descriptors pass over. Only what is used of descriptor.proto.
#[derive(Clone, PartialEq, Message)]
struct Files {
    #[prost(message, repeated, tag = "1")]
    file: Vec<File>,
}

#[derive(Clone, PartialEq, Message)]
struct File {
    #[prost(string, tag = "2")]
    package: String,
    #[prost(message, repeated, tag = "4")]
    messages: Vec<Type>,
    #[prost(message, repeated, tag = "5")]
    enums: Vec<Enum>,
}

#[derive(Clone, PartialEq, Message)]
struct Type {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    fields: Vec<Field>,
}

#[derive(Clone, PartialEq, Message)]
struct Field {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint32, tag = "3")]
    number: u32,
    #[prost(string, tag = "6")]
    type_name: String,
    #[prost(message, optional, tag = "8")]
    options: Option<FieldOptions>,
}

#[derive(Clone, PartialEq, Message)]
struct FieldOptions {
    #[prost(string, tag = "50801")]
    capability: String,
}

#[derive(Clone, PartialEq, Message)]
struct Enum {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    values: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(int32, tag = "2")]
    number: i32,
    #[prost(message, optional, tag = "3")]
    options: Option<ValueOptions>,
}

#[derive(Clone, PartialEq, Message)]
struct ValueOptions {
    #[prost(string, tag = "50802")]
    capability: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [descriptors, folder] = arguments.as_slice() else {
        return Err("usage: headrace-generate DESCRIPTORS FOLDER".into());
    };
    let bytes = fs::read(descriptors)?;
    let mut set = prost_types::FileDescriptorSet::decode(bytes.as_slice())?;
    for file in &mut set.file {
        if file.package().starts_with("google.") {
            file.source_code_info = None; // rustdoc would take its examples for programs
        }
    }
    // prost-build takes a list of numbers whose field has any option for one that is not packed.
    let messages = set.file.iter_mut().flat_map(|file| &mut file.message_type);
    messages.flat_map(|one| &mut one.field).for_each(|field| field.options = None);
    tonic_prost_build::configure().build_server(false).build_transport(false).out_dir(folder).compile_fds(set)?;
    for unused in ["google.api.rs", "google.protobuf.rs"] {
        let _ = fs::remove_file(Path::new(folder).join(unused)); // only options are of these
    }
    fs::write(Path::new(folder).join("marks.rs"), marks(&Files::decode(bytes.as_slice())?))?;
    Ok(())
}

/// The marks of each message that has some, or that has such a message in it.
fn marks(files: &Files) -> String {
    let ours: Vec<&File> = files.file.iter().filter(|file| file.package == "headrace.v1").collect();
    let types: BTreeMap<String, &Type> =
        ours.iter().flat_map(|file| &file.messages).map(|one| (format!(".headrace.v1.{}", one.name), one)).collect();
    let enums: BTreeMap<String, &Enum> =
        ours.iter().flat_map(|file| &file.enums).map(|one| (format!(".headrace.v1.{}", one.name), one)).collect();
    let valued = |field: &Field| -> Vec<(i32, String)> {
        let values = enums.get(&field.type_name).map(|one| one.values.as_slice()).unwrap_or_default();
        let named = values.iter().map(|value| (value.number, value.options.clone().unwrap_or_default().capability));
        named.filter(|(_, capability)| !capability.is_empty()).collect()
    };
    let capability = |field: &Field| field.options.clone().unwrap_or_default().capability;
    let mut marked: BTreeSet<String> = BTreeSet::new();
    loop {
        let more: BTreeSet<String> = types
            .iter()
            .filter(|(_, one)| {
                let needs =
                    |f: &Field| !capability(f).is_empty() || !valued(f).is_empty() || marked.contains(&f.type_name);
                one.fields.iter().any(needs)
            })
            .map(|(name, _)| name.clone())
            .collect();
        if more == marked {
            break;
        }
        marked = more;
    }
    let mut code = String::from(
        "// @generated from the options of headrace/v1/*.proto by scripts/generate-rust.sh\n\nuse crate::capability::Mark;\n",
    );
    for name in &marked {
        let _ = writeln!(code, "\npub(crate) static {}: &[Mark] = &[", constant(name));
        for field in &types[name].fields {
            let inner = if marked.contains(&field.type_name) { constant(&field.type_name) } else { "&[]".to_owned() };
            let (own, values) = (capability(field), valued(field));
            if own.is_empty() && values.is_empty() && inner == "&[]" {
                continue;
            }
            let _ = writeln!(
                code,
                "    // {}\n    Mark {{ field: {}, capability: {own:?}, values: &{values:?}, inner: {inner} }},",
                field.name, field.number
            );
        }
        code.push_str("];\n");
    }
    code
}

fn constant(name: &str) -> String {
    let mut made = String::new();
    for letter in name.trim_start_matches(".headrace.v1.").chars() {
        if letter.is_uppercase() && !made.is_empty() {
            made.push('_');
        }
        made.extend(letter.to_uppercase());
    }
    made
}
