//! What the library gave, in the protocol's form.

use headrace::proto::{self, AdapterState};
use headrace::{Choice, Chunk, Code, Completion, Error, Outcome, Token, Usage};
use serde_json::{Value, json};

const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn base64(bytes: &[u8]) -> String {
    let mut made = String::new();
    for group in bytes.chunks(3) {
        let padded = [group[0], *group.get(1).unwrap_or(&0), *group.get(2).unwrap_or(&0)];
        let bits = u32::from_be_bytes([0, padded[0], padded[1], padded[2]]);
        for place in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * place) & 63) as usize];
            made.push(if place > group.len() { '=' } else { char::from(letter) });
        }
    }
    made
}

fn bits(value: f32) -> String {
    format!("{:08x}", value.to_bits())
}

fn token(one: &Token) -> Value {
    let candidates: Vec<Value> = one
        .candidates
        .iter()
        .map(|other| {
            let logprob = bits(other.logprob);
            json!({"id": other.id, "text": other.text, "bytes": base64(&other.bytes), "logprob": logprob})
        })
        .collect();
    json!({
        "id": one.id, "text": one.text, "bytes": base64(&one.bytes), "logprob": one.logprob.map(bits),
        "rank": one.rank, "candidates": candidates,
    })
}

fn tokens(many: &[Token]) -> Vec<Value> {
    many.iter().map(token).collect()
}

pub(crate) fn chunk(one: &Chunk) -> Value {
    let calls: Vec<Value> = one
        .tool_calls
        .iter()
        .map(|part| json!({"index": part.index, "id": part.id, "name": part.name, "arguments": part.arguments}))
        .collect();
    json!({
        "choice": one.choice, "text": one.text, "token_ids": one.token_ids, "reasoning": one.reasoning,
        "tool_calls": calls, "tokens": tokens(&one.tokens),
    })
}

fn usage(told: &Usage) -> Value {
    json!({
        "prompt_tokens": told.prompt_tokens, "cached_tokens": told.cached_tokens,
        "completion_tokens": told.completion_tokens, "reasoning_tokens": told.reasoning_tokens,
        "draft_tokens": told.draft_tokens, "accepted_draft_tokens": told.accepted_draft_tokens,
        "prediction_draft_tokens": told.prediction_draft_tokens,
        "accepted_prediction_draft_tokens": told.accepted_prediction_draft_tokens,
    })
}

fn choice(one: &Choice) -> Value {
    let calls: Vec<Value> = one
        .tool_calls
        .iter()
        .map(|call| json!({"id": call.id, "name": call.name, "arguments": call.arguments}))
        .collect();
    json!({
        "index": one.index, "text": one.text, "token_ids": one.token_ids, "reasoning": one.reasoning,
        "tool_calls": calls, "tokens": tokens(&one.tokens), "usage": usage(&one.usage),
        "finish_reason": one.finish_reason.as_str(), "stop_string": one.stop_string,
        "stop_token_id": one.stop_token_id,
    })
}

pub(crate) fn result(told: &Completion) -> Value {
    let seed = told.accepted.as_ref().and_then(|accepted| accepted.sampling.as_ref()?.seed);
    let digest = told.accepted.as_ref().map(|accepted| &accepted.adapter_digest);
    json!({
        "request_id": told.request_id, "seed": seed.map(|seed| seed.to_string()), "adapter_digest": digest,
        "usage": usage(&told.usage),
        "choices": told.choices.iter().map(choice).collect::<Vec<_>>(),
    })
}

pub(crate) fn adapter(one: &proto::Adapter) -> Value {
    let state = match one.state() {
        AdapterState::Loading => "loading",
        AdapterState::Loaded => "loaded",
        AdapterState::Unloading => "unloading",
        AdapterState::Unspecified => "unknown",
    };
    json!({
        "name": one.name, "digest": one.digest, "rank": one.rank, "bytes": one.size_bytes, "modules": one.modules,
        "state": state, "pinned": one.pinned, "live": one.live_requests, "base_model": one.base_model,
    })
}

pub(crate) fn loaded(told: &proto::LoadAdapterResponse) -> Value {
    json!({"adapter": told.adapter.as_ref().map(adapter), "evicted": told.evicted})
}

pub(crate) fn error(told: &Error) -> Value {
    let fields: Vec<Value> =
        told.fields().iter().map(|one| json!({"field": one.field, "description": one.description})).collect();
    json!({
        "code": code(told.code()), "reason": told.reason(), "message": told.message(), "metadata": told.metadata(),
        "fields": fields, "retry_after_ms": told.retry_after().map(|delay| delay.as_millis()),
        "request_id": told.request_id(), "partial": told.partial().map(result),
    })
}

pub(crate) fn outcome(one: &Outcome) -> Value {
    match &one.result {
        Ok(told) => json!({"index": one.index, "result": result(told)}),
        Err(told) => json!({"index": one.index, "error": error(told)}),
    }
}

/// gRPC's name of a code.
fn code(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
