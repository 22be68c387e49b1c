"""The measured families of ops, one a file.

A file has OPS, name -> `cases.Op`, where "x_backward" is the backward pass of "x", and a function for each of its peers, named
as in `cases.PEERS`. The function imports the peer, and returns "x" -> function of the op's arguments. `eager` and `ours`,
which takes the kernel, are in every file. Without `compiled` torch.compile gets eager's functions.

Reports are printed without torch, so only functions import it.
"""
