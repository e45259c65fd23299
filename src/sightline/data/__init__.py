"""Pictures and what is known about them."""
