"""RMSNorm, forward and backward: alone, fused with a residual add, and times a gate."""
