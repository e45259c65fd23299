"""Corrections of a trained model: the intervention file, how it is applied, and the search on validation data."""
