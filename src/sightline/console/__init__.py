"""What commands print, and how they write files."""
