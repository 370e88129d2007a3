"""What proxies between a client and a server do to its calls (`trying`)."""
