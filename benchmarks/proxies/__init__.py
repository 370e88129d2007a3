"""What proxies between a client and a server do to its calls: nginx, HAProxy and Envoy at their
defaults, and with the configurations of `deploy/`.

    python -m benchmarks.proxies            # under five minutes; needs nginx, haproxy and envoy
    python -m benchmarks.proxies --long     # about six: with what Envoy cuts after five minutes

The proxies are the real programs on loopback, each in front of the same server. This is the real
service, as a process, around an engine that computes nothing and stays silent for as long as a
prompt says (`benchmarks.scripted_engine`). Each call is tried in each situation (`calls`), through
each proxy and directly. All run concurrently, so that waiting for the proxies' timeouts takes no
longer than the longest of them.
"""
