"""Tests of explanations: localisation, perturbation curves, sufficient subsets, neighbours, background swaps, label information in the mask shape."""
