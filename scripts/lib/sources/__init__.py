"""Bytes of raw data: pinning them in `files/` and reading records from them. Knows no chat."""
