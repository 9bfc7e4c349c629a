"""Hidden states of the target: the shard format, its reader, and the stage that writes them."""
