"""Proxies between a client and a server: nginx, HAProxy and Envoy as real programs on loopback."""
