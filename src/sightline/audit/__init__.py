"""What a person sees. Nothing here imports `what`, and of `where` only the maps of what an answer relies on."""
