"""Watches long work: when it ends, and what it shows meanwhile. Nothing here decides a byte of any result."""
