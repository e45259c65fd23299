"""The Gradio app: one model, many viewers."""
