"""What keeps a drafter from working in silence: each known misconfiguration by name, with its evidence and its repair."""
