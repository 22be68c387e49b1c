"""Triton device code: all `@triton.jit` functions of the package, and nothing else."""
