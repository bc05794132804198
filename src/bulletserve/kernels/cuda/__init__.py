"""Kernels for NVIDIA GPUs, aware of how many SMs they may use. Importing anything here needs Triton."""
