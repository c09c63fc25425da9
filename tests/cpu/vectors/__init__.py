"""Vectors for each opcode: inputs, the PTX that a GPU and the CPU device run alike, and what numpy says of it.

`cases` has the table, `run` runs it on a device, `record` writes what a GPU answered to golden files, which are
compared with the CPU device where there is no GPU.

To record anew, on a machine with a GPU of sm_90a, from the root of the repository::

    python -m tests.cpu.vectors.record --into FOLDER

Read ``report.txt`` in that folder: an oracle that differs is to be mended until it says what the GPU answered, for
which no other recording is needed, since the digests tell when it does (``--oracles`` compares them all, on no
device). Then put ``golden.json`` and ``golden.npz`` here. They hold what the GPU answered and nothing of the oracles,
but for one thing: which results have no digest, or one with NaNs all alike, follows from the kind of what the oracle
returns (`Near`, `AnyNaN`). A case whose inputs, text or kind of oracle changes needs recording.
"""
