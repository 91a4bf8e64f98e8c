"""Mixed lengths: each document of a micro-batch runs on as many ranks as its length needs.

cost     work of a document, from the shape of the model
measured work in time, on a described machine
solve    ranks of each document, with the least work on the slowest rank
feed     batches of documents on their ranks
predict  work and bytes of both settings for a histogram of lengths
"""
