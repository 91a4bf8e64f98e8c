"""``check_grads``: gradients of a parallel layer against those of one rank."""
