"""Answers a few prompts of each dataset, to say before the start what the whole will take."""
