"""Metrics: the predictions table, group metrics, intervals, localisation, overlap, key points, compute cost."""
