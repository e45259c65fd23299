"""Predictions and features for large collections: what is read, how it is divided, and who computes it."""
