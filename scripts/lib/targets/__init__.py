"""The target model as an HF layout in bf16, whatever it came from."""
