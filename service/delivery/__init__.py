"""Delivery: the path from the engine's step outputs to the streams that carry them to clients.

The path of a result:
1. The engine passes all outputs of one step to `registry.Registry.on_step`, on the event loop.
2. Each output goes to its `ServedRequest`, then to that request's `log.EventLog`, and there to its
   choice (`choice.ChoiceLog`). Tokens become text, stop strings are found, and everything that has
   not been taken yet is merged into one pending delta.
3. The request puts itself into its stream (`session.ResultStream`, a mailbox, one per RPC), which
   wakes its writer. The writer takes everything that is pending for all of the stream's requests
   together: one message per engine step and stream, or fewer if the client reads slowly. Events get
   their sequence numbers when they are taken, not before.
4. Events that may be read again (AddRequest, Generate, a session with a lease) stay in the log for
   the retention time.

Each request changes its own state according to one table of states (`states`). `registry` finds
requests and counts them. `timers` has all timers.

This package does not use protobuf. Events are plain data (`events`), which `service.convert`
converts to messages.

Memory is bounded. `flow` limits the pending output of a request, which is then held and later
ended, or its total length if the whole result must fit in memory. `charges` charges unread output
to its caller as it arrives and is read. `service.admission.admission_control` limits the total for
all callers: beyond it, new requests are refused, and running requests are held or ended. `kept`
limits what is kept to be read again.
"""
