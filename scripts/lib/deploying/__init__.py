"""A drafter to hand on: its files, how to serve it, what it was made of, and checks of the server that runs it."""
