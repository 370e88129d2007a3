"""Part `proxy`: headers that gRPC does not limit, sent directly and through a proxy that limits
them.

gRPC's core buffers a call's headers until their end, whatever `max_metadata_size` says, and HTTP/2
lets them continue in CONTINUATION frames indefinitely. A stranger needs no token for this attack.
The same flood is therefore sent twice. Sent directly, the server's memory growth is reported but
not judged. Sent through Envoy with the configuration in `deploy/`, neither the server nor Envoy may
grow by more than the limit for strangers.
"""
