"""Mixed lengths: each document of a micro-batch runs on as many ranks as its length needs.

feed     batches of documents on their ranks
predict  work of both settings for the documents of a corpus
"""
