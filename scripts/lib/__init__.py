"""The rooms. Imports go from the upper rooms to the lower ones, never up: `tests/test_rooms.py` draws the graph."""
