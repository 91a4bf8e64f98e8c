"""Formats of rows in transfer: the dtype of the wire, and scales of narrower dtypes."""
