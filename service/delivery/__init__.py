"""Delivery: between the engine's step outputs and the streams that carry them to clients.

The journey of a result:
1. The engine hands all outputs of one step to `registry.Registry.on_step`, on the event loop.
2. Each output goes to its `request.ServedRequest`, into that one's `log.EventLog`, and there into
   its choice (`choice.ChoiceLog`): tokens become text, stop strings are found, and everything that
   was not taken yet is merged into one pending delta.
3. The request puts itself into its stream (`session.ResultStream`, a mailbox, one per RPC), which
   wakes its writer. That takes all that is pending of all its requests at once: one message per
   engine step and stream, fewer where the client reads slowly. What is taken gets its sequence
   number then, never before.
4. What may be wanted again (AddRequest, Generate, a session with a lease) stays in the log until
   its retention has passed.

The request decides what becomes of it, by one table of states (`states`); `registry` finds it, and
counts; `timers` has all timers.

Nothing here knows protobuf: events are the plain dataclasses of `events`; `service.convert` turns
them into messages.

Memory is bounded: what is pending of a request by `flow` (the request is held, then ended), or by
its own length where its output is to be kept; the number of requests whose results are not
delivered yet, and the bytes of all of them, by `service.admission` (new ones are refused beyond
that); and what is kept of ended ones by `kept`, by count and bytes.
"""
