"""A look at a source before it is in the config: what it holds, and the config entry that would read it."""
