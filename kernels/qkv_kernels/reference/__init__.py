"""Reference kernels: obvious torch, the definition that fused kernels are compared with."""
