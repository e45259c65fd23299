"""The HTML report, its figures and text, galleries, and the model card."""
