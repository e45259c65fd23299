"""Readers of published datasets, builders of datasets with a known shortcut, and the toy dataset."""
