"""The reference speculative loop: plain and chain decoding at batch 1, and the check that both write the same."""
