"""The CUDA backend: kernels of csrc/cuda, compiled on the user's machine. It has never run on hardware."""
