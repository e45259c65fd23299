"""Files from strangers, made by changing valid ones: whatever is in them, they are read or refused in one line."""
