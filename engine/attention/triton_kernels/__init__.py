"""Paged attention on a CUDA device, in Triton.

Contexts are read in place, through the block tables.

    write    one program per token; writes its key and value to the cache
    decode   requests with one token; as many programs as the device can run at the same time,
             each with an equal share of all cuts of all contexts
    merge    merges the results of a context's cuts, in order
    prefill  all other requests; one program per (tile of a request's tokens, key/value head), or
             two that split the values of wide heads

All query heads of a key/value head are rows of one tile, so that a context is read once for all of
them. Decode has a separate kernel for two reasons: a decode program would have too few rows for the
prefill kernel's tiles, and a single program for a long context would leave the device idle.

Lengths are read on the device, so that a launch can be captured and replayed for any lengths. The
host lists the cuts of all requests once a step, and each decode program takes an equal part of the
list. A long context among short ones is therefore computed by many programs. A prefill grid is an
upper bound, and programs with nothing to do exit immediately.

A request's result does not depend on the other requests in the step. In a mixed step, each
request's number of tokens decides which kernel computes it. The cuts of a context depend only on
the request's own position (`_cuts` in `decode`), which program computes a cut does not affect the
result, and tiles of keys begin at multiples of BLOCK_N.

Scores, softmax and sums are float32. Scores are in units of log 2, because the hardware computes
2^x. Memory beyond a context or before a window is never read, because it may contain NaN. The
arrays of a step are described in `step_arrays`; all are int64.
"""
