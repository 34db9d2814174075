"""KV lies here, on the host or on a GPU, and is copied here, there by the CUDA driver. No torch."""
