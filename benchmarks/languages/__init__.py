"""How fast the client libraries are, language by language.

    python -m benchmarks.languages [--language go …] [--case one …]

A server with a scripted engine has one core, a language's load program the other (`taskset`). The
programs of all languages take turns, so that what the machine does meanwhile hits all of them. A
language is a row in `rows`, and a load program beside its driver:

    PROGRAM TARGET SESSIONS REQUESTS TOKENS

It connects a client. For each line on stdin it plays a turn: it opens SESSIONS sessions, submits
REQUESTS requests on each ("Once upon a time", temperature 0, TOKENS tokens, without heed of
end-of-sequence), reads each request's chunks as its users would, closes the sessions, and prints
{"tokens": how many token ids the chunks had} as a line. At the end of stdin it ends. Time, CPU time
and memory are measured from outside, the same for all.
"""
