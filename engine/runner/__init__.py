"""Everything that touches the device: loading, memory, the cache's tensors, and running a batch."""
