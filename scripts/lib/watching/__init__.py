"""Watches long work: when it ends, and what it shows meanwhile."""

DECIDES_NO_BYTE = True  # of any result: a better estimate of the end makes no answer stale
