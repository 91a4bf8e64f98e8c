"""One row per (token, rank): dispatches of a dispatcher whose experts are the ranks, as DeepEP sends tokens.

    token 5, experts 0 1 on rank 0 and 2 3 on rank 1, ids [2, 0, 3]

    slots      2 0 3
    owners     1 0 1
    sent to    . 0 1        each rank once, in the order of its last slot: combine adds as DeepEP's reference does

A rank receives the rows in the order (source rank, token). The extra values of a row are 32-bit words: source rank,
token, and what the caller adds, such as expert ids, weights and scales. No autograd.
"""
