"""Sightline: image classifiers that can only see what they show you."""

__version__ = "0.1.0.dev0"
