"""RMSNorm, forward and backward, by itself, of a residual add, and times a gate."""
