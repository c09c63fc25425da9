"""PTX instructions -> LLVM IR: one file per family, one function per opcode."""

from . import access, arithmetic, bits, convert, float, matrix, multimem, special, sync, warp, warpgroup
from .core import LOWERINGS, Lower, UnsupportedError

__all__ = [
    "LOWERINGS",
    "Lower",
    "UnsupportedError",
    "access",
    "arithmetic",
    "bits",
    "convert",
    "float",
    "matrix",
    "multimem",
    "special",
    "sync",
    "warp",
    "warpgroup",
]
