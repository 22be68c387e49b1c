"""One file for each family of ops; RMSNorm, which has several, is a folder."""
