"""Measurements of speed: each prints what it measured as JSON on its last line."""
