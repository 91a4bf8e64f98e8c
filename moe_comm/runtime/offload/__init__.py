"""Chunks of bytes in a file or in host memory, and a budget of memory for those that are used.

files    the file of a rank, and host memory, as stores of bytes at offsets
store    a budget of memory, and threads that read and write chunks
"""
