"""Tests of explanations: localisation, perturbation curves, sufficient input subsets, nearest neighbours, background
swaps, label information in the mask shape."""
