"""What a person sees. Nothing here imports `where` or `what`."""
