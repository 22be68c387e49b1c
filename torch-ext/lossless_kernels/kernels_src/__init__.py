"""Triton device code. Every `@triton.jit` function of the package lives here and nothing else does."""
