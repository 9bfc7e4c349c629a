"""Starts, watches and ends SGLang servers, or attaches to running ones. SGLang itself lives in an environment of its own."""
