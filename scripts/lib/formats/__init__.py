"""From a raw record of any known shape to a prepared row. A new shape is one module and one line in `registry.py`."""
