"""The report of a run: benchmark tables, plots, and what became of every row."""
