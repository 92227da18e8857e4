"""What runs on the GPU host: slots, batching, sampling, and the process around them."""
