"""Entry points, one a stage: `python -m scripts.<stage>`."""
