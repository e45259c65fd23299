"""The proof that a model is blind outside its sight, its perturbations of hidden pixels, and the leak finder."""
