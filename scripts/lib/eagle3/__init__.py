"""The EAGLE-3 drafter: layer ids, the network, the folder that engines load, and what it takes over from the target."""
