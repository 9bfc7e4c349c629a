"""`python -m sglang.launch_server` on a processor without SGLang's compiled kernels; takes the same flags.

Run by SGLang's own interpreter, with this folder on PYTHONPATH. SGLang's processes import this file again when they are spawned, which
is why `boot` stands at the top.
"""

import runpy

import boot  # noqa: F401

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
