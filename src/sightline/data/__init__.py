"""Datasets: rows, images, the cache, batches, augmentation, checks and near-duplicates."""
