"""The proof that a model is blind outside its sight, the perturbations it uses, and the leak finder."""
