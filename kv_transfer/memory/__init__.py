"""Where KV lies and how it is copied: on the host, or on a GPU by the CUDA driver. No torch."""
