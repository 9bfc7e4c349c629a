"""What runs inside SGLang's processes; the folder is on their PYTHONPATH, so nothing else may lie in it."""
