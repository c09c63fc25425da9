"""What a driver says to right and wrong calls: 108 cases, and what an H200 answered to each.

Each chapter has its cases, one function each; `world` has what they share. `record` runs each in a process of its own,
and ``h200.json`` holds the answers of an H200 under a driver for CUDA 13.0.

To record anew, on a machine with one H200, from the root of the repository::

    python -m tests.cpu.refusals.record OUT.json

Then put the file here as ``h200.json``. Some answers are the GPU's own (extents, counts, sizes): another kind of GPU
does not give the same.
"""
