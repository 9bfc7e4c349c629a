"""Lets the target write the assistant turns of prepared rows."""
