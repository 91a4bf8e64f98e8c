"""Mixed lengths: the work of documents, and the ranks that share it. Loads no torch.

cost    work of a document, from the shape of the model
solve   ranks of each document, with the least work on the slowest rank
loads   work of each rank with static and with balanced lengths
"""
