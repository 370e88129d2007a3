//! Trace context (W3C): what a call carries of the span in which it is made.

use std::fmt;
use std::sync::Arc;

use crate::proto;

/// The contract's bounds of labels.
const MAX_LABELS: usize = 16;
const MAX_LABEL_BYTES: usize = 128;

/// A W3C trace context, as it travels in metadata and labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// Such as `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`.
    pub traceparent: String,
    /// What vendors add; empty: nothing.
    pub tracestate: String,
}

impl TraceContext {
    /// That of OpenTelemetry's current context, if it has a span.
    #[cfg(feature = "opentelemetry")]
    pub fn current() -> Option<Self> {
        use opentelemetry::trace::TraceContextExt as _;
        opentelemetry::Context::map_current(|context| {
            let span = context.span();
            let span = span.span_context();
            span.is_valid().then(|| Self {
                traceparent: format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), span.trace_flags().to_u8()),
                tracestate: span.trace_state().header(),
            })
        })
    }
}

/// Gives the trace context of who calls now.
#[derive(Clone)]
pub(crate) struct Tracer(Arc<dyn Fn() -> Option<TraceContext> + Send + Sync>);

impl Default for Tracer {
    #[cfg(feature = "opentelemetry")]
    fn default() -> Self {
        Self(Arc::new(TraceContext::current))
    }

    #[cfg(not(feature = "opentelemetry"))]
    fn default() -> Self {
        Self(Arc::new(|| None))
    }
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tracer")
    }
}

impl Tracer {
    pub(crate) fn new(hook: impl Fn() -> Option<TraceContext> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    pub(crate) fn now(&self) -> Option<TraceContext> {
        (self.0)()
    }
}

/// Puts the trace context in the labels of a request that goes over a session, whose one call brings requests of many
/// callers. What the server would refuse as a label is left out: the request matters more than its trace.
pub(crate) fn label(context: Option<TraceContext>, spec: &mut proto::GenerationSpec) {
    let Some(context) = context else { return };
    if spec.labels.iter().any(|label| label.name == "traceparent") {
        return;
    }
    for (name, value) in [("traceparent", context.traceparent), ("tracestate", context.tracestate)] {
        if !value.is_empty() && value.len() <= MAX_LABEL_BYTES && spec.labels.len() < MAX_LABELS {
            spec.labels.push(proto::Label { name: name.to_owned(), value });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_its_trace_in_its_labels() {
        let context = TraceContext { traceparent: "00-1-2-01".to_owned(), tracestate: "a=b".to_owned() };
        let mut spec = proto::GenerationSpec::default();
        label(Some(context.clone()), &mut spec);
        let names =
            |spec: &proto::GenerationSpec| spec.labels.iter().map(|label| label.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&spec), ["traceparent", "tracestate"]);
        label(Some(context), &mut spec); // its own stay
        assert_eq!(spec.labels.len(), 2);
        let mut plain = proto::GenerationSpec::default();
        label(None, &mut plain);
        assert!(plain.labels.is_empty());
    }
}
