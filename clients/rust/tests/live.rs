//! What only Rust has, against a server whose greedy output is the prompt's bytes, over and over: a token takes it some
//! milliseconds. `tests/clients/rust` starts it, and names it in `HEADRACE_TARGET`.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_core::Stream as _;
use headrace::{BatchOptions, Client, Code, ErrorKind, FinishReason, Request, Session, SessionOptions};

/// More tokens than a test has time for: what ends before was ended.
const ENDLESS: u32 = 90_000;

fn client() -> Client {
    Client::connect("").expect("HEADRACE_TARGET is set")
}

fn session(client: &Client) -> Session {
    client.session(SessionOptions::new()).unwrap()
}

fn endless() -> Request {
    Request::text("endless").max_tokens(ENDLESS)
}

/// What a request that was ended has; a minute is not enough for all of its tokens.
async fn soon<T>(told: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), told).await.expect("it was not ended")
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_dropped_handle_cancels_its_request() {
    let client = client();
    let session = session(&client);
    let (dropped, kept) = (session.submit(endless()).unwrap(), session.submit(endless()).unwrap());
    dropped.next().await.unwrap().unwrap();
    drop(dropped);
    while session.live() > 1 {
        kept.next().await.unwrap().unwrap();
    }
    kept.cancel();
    assert_eq!(soon(kept.result()).await.unwrap().finish_reason(), FinishReason::Cancelled);
    soon(session.finish()).await.unwrap();
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_detached_handle_leaves_its_request_running() {
    let client = client();
    let session = session(&client);
    let request = Request::text("whole").max_tokens(8).id("detached-of-rust");
    session.submit(request).unwrap().detach();
    assert_eq!(session.live(), 1);
    soon(session.finish()).await.unwrap();
    assert_eq!(session.live(), 0);
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_dropped_session_cancels_what_runs_on_it() {
    let client = client();
    let session = session(&client);
    let handle = session.submit(endless()).unwrap();
    handle.next().await.unwrap().unwrap();
    drop(session);
    assert_eq!(soon(handle.result()).await.unwrap().finish_reason(), FinishReason::Cancelled);
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_dropped_wait_leaves_the_request_running() {
    let client = client();
    let session = session(&client);
    let handle = session.submit(Request::text("abc").max_tokens(200)).unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(1), handle.result()).await.is_err());
    assert_eq!(soon(handle.result()).await.unwrap().token_ids().len(), 200);
    session.finish().await.unwrap();
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_handle_is_a_stream_by_reference_too() {
    let client = client();
    let session = session(&client);
    let handle = session.submit(Request::text("abc").max_tokens(6)).unwrap();
    let (mut text, mut reader) = (String::new(), &handle);
    while let Some(chunk) = poll_fn(|cx| Pin::new(&mut reader).poll_next(cx)).await {
        text += &chunk.unwrap().text;
    }
    assert_eq!(text, handle.result().await.unwrap().text());
    assert_eq!(text, "bcabca");
    assert!(handle.next().await.is_none());
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_stream_gives_its_error_once_then_ends() {
    let mut stream = client().stream("");
    let error = stream.next().await.unwrap().unwrap_err();
    assert_eq!((error.code(), error.kind()), (Code::InvalidArgument, ErrorKind::Status));
    assert_eq!(error.fields()[0].field, "spec.text.text");
    assert!(stream.next().await.is_none());
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_batch_takes_requests_as_there_is_room() {
    let client = client();
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&taken);
    let requests = (0..20).map(move |number| {
        counted.fetch_add(1, Ordering::Relaxed);
        Request::text(format!("{number:02}")).max_tokens(2)
    });
    let mut batch = client.batch(requests, BatchOptions::new().max_in_flight(3).ordered(true)).unwrap();
    assert_eq!(taken.load(Ordering::Relaxed), 0);
    let mut indices = Vec::new();
    while let Some(outcome) = batch.next().await {
        indices.push(outcome.index);
        assert_eq!(outcome.result.unwrap().token_ids().len(), 2);
        assert!(taken.load(Ordering::Relaxed) <= indices.len() + 2 + 3 * 16);
        if indices.len() == 1 {
            assert!(taken.load(Ordering::Relaxed) <= 1 + 2 * 3);
        }
    }
    assert_eq!(indices, (0..20).collect::<Vec<_>>());
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_request_without_a_stream_is_read_again_and_attached() {
    let client = client();
    let id = client.add(Request::text("abc").max_tokens(6)).await.unwrap().request_id;
    let whole = soon(client.result(&id)).await.unwrap();
    let mut stream = client.attach(&id, 1);
    assert_eq!(soon(stream.result()).await.unwrap().text(), whole.text());
    let session = session(&client);
    assert_eq!(soon(session.attach(&id).unwrap().result()).await.unwrap().text(), whole.text());
    let error = session.attach_from(&id, 3, 0).unwrap_err();
    assert_eq!((error.kind(), error.fields()[0].field.as_str()), (ErrorKind::Invalid, "choices"));
    session.finish().await.unwrap();
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn a_closed_client_says_so() {
    let client = client();
    let session = session(&client);
    let handle = session.submit(endless()).unwrap();
    handle.next().await.unwrap().unwrap();
    client.close().await;
    let errors = [
        handle.result().await.unwrap_err(),
        session.submit("late").unwrap_err(),
        client.generate("late").await.unwrap_err(),
        client.session(SessionOptions::new()).unwrap_err(),
    ];
    for error in errors {
        assert_eq!((error.code(), error.kind()), (Code::Unavailable, ErrorKind::Closed), "{error}");
    }
    session.close().await;
}

#[tokio::test]
#[ignore = "it needs the server that tests/clients/rust starts"]
async fn calls_about_the_model() {
    let client = client();
    client.wait_ready().await.unwrap();
    assert!(client.model().await.unwrap().limits.unwrap().max_running_requests > 0);
    let ids = client.tokenize("abc").await.unwrap();
    assert_eq!(client.detokenize(ids).await.unwrap(), "abc");
    assert_eq!(client.tokenize(Request::tokens([1])).await.unwrap_err().kind(), ErrorKind::Invalid);
}
