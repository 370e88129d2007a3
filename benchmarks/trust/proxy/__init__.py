"""Part `proxy`: what gRPC does not bound, straight to the server and through a proxy that does.

gRPC's core keeps what it reads of a call's headers until their end, whatever `max_metadata_size`
says, and HTTP/2 lets them go on in CONTINUATION frames for as long as the sender likes. A stranger
needs no token for that. So the same flood is sent twice: straight to the server, where what it
takes is told and not judged, and through Envoy with the configuration of `deploy/`, where neither
the server nor Envoy may grow by more than strangers may take.
"""
