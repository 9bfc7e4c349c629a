"""The target as an engine: prompt ids to answers, token rows to hidden states."""
