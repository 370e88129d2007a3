"""Delivery: between the engine's step outputs and the streams that carry them to clients.

The journey of a result:
1. The engine hands all outputs of one step to `registry.Registry.on_step`, on the event loop.
2. Each output goes to its `ServedRequest`, into that one's `log.EventLog`, and there into
   its choice (`choice.ChoiceLog`): tokens become text, stop strings are found, and everything that
   was not taken yet is merged into one pending delta.
3. The request puts itself into its stream (`session.ResultStream`, a mailbox, one per RPC), which
  wakes its writer. The writer takes everything that is pending for all of its requests at once: one
  message per engine step and stream, fewer if the client reads slowly. Events get their sequence
  numbers when they are taken, not before.
4. Events that may be read again (AddRequest, Generate, a session with a lease) stay in the log for
  the retention time.

Each request changes its own state, by one table of states (`states`); `registry` finds requests and
counts them; `timers` has all timers.

Nothing here knows protobuf: events are plain data (`events`); `service.convert` turns
them into messages.

Memory is bounded. `flow` limits the pending output of a request (the request is held, then
ended), or its whole length, if that must have room. `charges` charges unread output to its caller
as it comes and goes; `service.admission.admission_control` limits what all may have (beyond that,
new requests are refused, and those that run are held, or end). `kept` limits what is kept to be
read again.
"""
