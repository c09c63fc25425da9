"""The operations in numpy: what the kernels must compute, plain and slow. They take and give host arrays.

One file for each op, of the op's name: ``from drvkit.ref.scale import scale``. A reference rounds where its kernel
does.

Where the kernel computes in float32 so does the reference, not in a wider type: most results would be the same, but
not those that the float32 step has rounded to a tie of the stored type, or away from one.
"""
