"""Paged attention on a CUDA device, in Triton. Contexts are read in place, through the block
tables.

    write    one program a token: its key and value into the cache
    decode   requests with one token: as many programs as the device has places for; each takes an
             equal share of all cuts of all contexts
    merge    merges a context's cuts, in order
    prefill  the other requests: one program a (tile of one request's tokens, key/value head), or
             two for halves of the values of wide heads

All query heads of a key/value head are rows of one tile, so that a context is read once for them.
There are two kernels, because a decode program would have too few rows for the prefill kernel's
tiles, and a single program for a long context would leave the device idle. In a mixed step, each
request's own number of tokens decides which kernel computes it, so its result does not depend on
the other requests in the step.

Lengths are read on the device, so that a launch can be captured and replayed, whatever the lengths
are: each decode program counts the cuts of all requests and finds its share, so a long context
among short ones is computed by many programs; a prefill grid is an upper bound, and programs with
nothing to do end at once. The cuts of a context depend only on the request's own position (`_cuts`
in `decode`), which program computes a cut does not change it, and tiles of keys begin at multiples
of BLOCK_N. So a request's result does not depend on other requests.

Scores, softmax and sums are float32. Scores are in units of log 2, because the hardware computes
2^x. Memory beyond a context or before a window is never read, because it may be NaN. The arrays of
a step are those of `step_arrays`, all int64.
"""
