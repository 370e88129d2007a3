"""How fast the client libraries are, language by language.

    python -m benchmarks.languages [--language go …] [--case one …]

A server with a scripted engine has one core, and a language's load program has the other
(`taskset`). The programs of all languages take turns, so that interference affects all of them
alike. A language is a row in `rows`, and a load program next to its driver:

    PROGRAM TARGET SESSIONS REQUESTS TOKENS

It connects a client. For each line on stdin it runs a turn. It opens SESSIONS sessions and submits
REQUESTS requests on each ("Once upon a time", temperature 0, TOKENS tokens, ignoring
end-of-sequence). It reads each request's chunks as its users would, closes the sessions, and prints
{"tokens": how many token ids the chunks had} as a line. At the end of stdin it exits. Time, CPU
time and memory are measured from outside, in the same way for all.
"""
