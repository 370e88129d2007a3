//! Calls about the model and the server.

use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

use crate::call::{About, Attempts};
use crate::capability::{TOKENIZE_REQUEST, required_by};
use crate::client::Client;
use crate::error::Error;
use crate::pool::Server;
use crate::proto;
use crate::proto::generation_spec::Input;
use crate::request::Request;
use crate::result::Token;
use crate::transport::HealthRequest;

/// The most that the contract has on a page.
const PAGE_SIZE: u32 = 1000;
const READY_PAUSE: Duration = Duration::from_millis(200);

impl Client {
    /// Describes the model and the server's limits.
    ///
    /// # Errors
    ///
    /// The call failed; see [`Error`].
    pub async fn model(&self) -> Result<proto::ModelCard, Error> {
        let message = proto::GetModelRequest::default();
        let send = |server: Arc<Server>, request| async move { server.connection.models().get_model(request).await };
        Ok(self.anywhere(&message, send).await?.model.unwrap_or_default())
    }

    /// The adapters that the caller may use, by name; of several servers, those of one.
    ///
    /// # Errors
    ///
    /// The call failed; see [`Error`].
    pub async fn adapters(&self) -> Result<Vec<proto::Adapter>, Error> {
        let mut message = proto::ListAdaptersRequest { page_size: PAGE_SIZE, ..Default::default() };
        let send =
            |server: Arc<Server>, request| async move { server.connection.models().list_adapters(request).await };
        let mut found = Vec::new();
        loop {
            let answer = self.anywhere(&message, send).await?;
            found.extend(answer.adapters);
            message.page_token = answer.next_page_token;
            if message.page_token.is_empty() {
                return Ok(found);
            }
        }
    }

    /// The token ids of a request's prompt, text or a conversation, exactly as the request would have them. What else the
    /// request says is not looked at.
    ///
    /// # Errors
    ///
    /// The prompt was refused, or is token ids already; see [`Error`].
    pub async fn tokenize(&self, request: impl Into<Request>) -> Result<Vec<u32>, Error> {
        Ok(self.ask_for_tokens(request.into(), false).await?.token_ids)
    }

    /// The same, with each token's text and bytes.
    ///
    /// # Errors
    ///
    /// As those of [`tokenize`](Self::tokenize).
    pub async fn tokenize_details(&self, request: impl Into<Request>) -> Result<Vec<Token>, Error> {
        let answer = self.ask_for_tokens(request.into(), true).await?;
        Ok(answer.tokens.into_iter().map(Token::from_proto).collect())
    }

    async fn ask_for_tokens(&self, request: Request, details: bool) -> Result<proto::TokenizeResponse, Error> {
        use proto::tokenize_request::Input as Prompt;
        let input = match request.build()?.input {
            Some(Input::Text(text)) => Prompt::Text(text),
            Some(Input::Chat(chat)) => Prompt::Chat(chat),
            Some(Input::Tokens(_)) | None => return Err(Error::invalid("token_ids", "are tokenized already")),
        };
        let mut message =
            proto::TokenizeRequest { input: Some(input), token_details: details, required_capabilities: Vec::new() };
        message.required_capabilities = required_by(&message, TOKENIZE_REQUEST, &[]);
        let send = |server: Arc<Server>, request| async move { server.connection.models().tokenize(request).await };
        self.anywhere(&message, send).await
    }

    /// The text of token ids, without special tokens.
    ///
    /// # Errors
    ///
    /// The call failed; see [`Error`].
    pub async fn detokenize(&self, ids: impl Into<Vec<u32>>) -> Result<String, Error> {
        let message = proto::DetokenizeRequest { token_ids: ids.into(), ..Default::default() };
        let send = |server: Arc<Server>, request| async move { server.connection.models().detokenize(request).await };
        Ok(self.anywhere(&message, send).await?.text)
    }

    /// Whether a server is ready for requests. A server that loads its model is not.
    ///
    /// # Errors
    ///
    /// No server can be reached.
    pub async fn is_ready(&self) -> Result<bool, Error> {
        let send = |server: Arc<Server>, request| async move {
            server.connection.is_serving(request).await.map(tonic::Response::new)
        };
        self.anywhere(&HealthRequest::of_generation(), send).await
    }

    /// Returns once a server is ready for requests. Bound the wait with [`tokio::time::timeout`].
    ///
    /// # Errors
    ///
    /// What does not mend by waiting, such as a caller whom the server does not know.
    pub async fn wait_ready(&self) -> Result<(), Error> {
        loop {
            match self.is_ready().await {
                Ok(true) => return Ok(()),
                Err(error) if error.code() != Code::Unavailable || error.kind() == crate::ErrorKind::Closed => {
                    return Err(error);
                }
                Ok(false) | Err(_) => tokio::time::sleep(READY_PAUSE).await,
            }
        }
    }

    /// A short call that any server may answer.
    pub(crate) async fn anywhere<M, A, F, S>(&self, message: &M, send: S) -> Result<A, Error>
    where
        M: Clone,
        S: Fn(Arc<Server>, tonic::Request<M>) -> F,
        F: Future<Output = Result<tonic::Response<A>, tonic::Status>>,
    {
        let pool = &self.inner.pool;
        let deadline = pool.short_deadline();
        let about = About { deadline, trace: pool.settings.tracer.now(), ..About::default() };
        Ok(pool.call(Attempts::new(pool, None, deadline), &about, message, send).await?.0)
    }
}
