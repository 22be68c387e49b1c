"""A family of ops each, in a file of its own; RMSNorm, which has several, in a folder."""
