"""One communicator per process group, and the collectives without autograd that run over it."""
