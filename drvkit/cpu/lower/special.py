"""Special registers.

Source: PTX ISA, "Special Registers".
"""

from __future__ import annotations

from ..ir import Value, constant, vector
from .core import WARP, Lower

__all__ = ["read_special"]

AXES = {"x": 0, "y": 1, "z": 2}
_MASKS = {
    "%lanemask_eq": [1 << lane for lane in range(WARP)],
    "%lanemask_lt": [(1 << lane) - 1 for lane in range(WARP)],
    "%lanemask_le": [(2 << lane) - 1 for lane in range(WARP)],
    "%lanemask_gt": [~((2 << lane) - 1) for lane in range(WARP)],
    "%lanemask_ge": [~((1 << lane) - 1) for lane in range(WARP)],
}


def read_special(e: Lower, name: str) -> Value:
    """Its value: a scalar where it is the same in all lanes."""
    b = e.b
    base, _, axis = name.partition(".")
    if base == "%tid":
        if axis not in AXES:
            raise e.unsupported(why=name)
        if (name, 0) not in e.specials:  # read once, at the entry
            place = e.warp_place(f"tid_{axis}")
            e.specials[name, 0] = b.load(vector("i32", WARP), place, align=64)
        return e.specials[name, 0]
    fields = {
        "%ctaid": lambda: e.block_field("index", AXES[axis]),
        "%ntid": lambda: e.grid_field("block", AXES[axis]),
        "%nctaid": lambda: e.grid_field("grid", AXES[axis]),
        "%cluster_ctaid": lambda: e.block_field("cluster_index", AXES[axis]),
        "%cluster_nctaid": lambda: e.grid_field("cluster", AXES[axis]),
        "%clusterid": lambda: e.block_field("cluster_id", AXES[axis]),
        "%nclusterid": lambda: b.op("udiv", e.grid_field("grid", AXES[axis]), e.grid_field("cluster", AXES[axis])),
    }
    if base in fields:
        if axis not in AXES:
            raise e.unsupported(why=name)
        return fields[base]()
    if base in _MASKS:
        return Value(
            f"<{', '.join(f'i32 {m & 0x7FFFFFFF | -(m & 0x80000000)}' for m in _MASKS[base])}>", vector("i32", WARP)
        )
    plain = {
        "%laneid": lambda: e.lane_id,
        "%warpid": lambda: e.warp_field("index"),
        "%nwarpid": lambda: e.grid_field("warps"),
        "%smid": lambda: b.cast("trunc", b.op("urem", e.block_field("number"), constant("i64", SMS)), "i32"),
        "%nsmid": lambda: constant("i32", SMS),
        "%gridid": lambda: b.cast("zext", e.grid_field("id"), "i64"),
        # Where the grid barrier of cooperative_groups is; its high half comes first.
        "%envreg1": lambda: _high(e, e.grid_field("workspace")),
        "%envreg2": lambda: b.cast("trunc", e.grid_field("workspace"), "i32"),
        "%cluster_ctarank": lambda: e.block_field("cluster_rank"),
        "%cluster_nctarank": lambda: e.grid_field("cluster_blocks"),
        "%is_explicit_cluster": lambda: b.cast("trunc", e.grid_field("explicit_cluster"), "i1"),
        "%dynamic_smem_size": lambda: e.grid_field("dynamic_shared_bytes"),
        "%total_smem_size": lambda: e.grid_field("shared_bytes"),
        "%aggr_smem_size": lambda: e.grid_field("shared_bytes"),
        "%clock": lambda: b.cast("trunc", cycles(e), "i32"),
        "%clock_hi": lambda: _high(e, cycles(e)),
        "%clock64": lambda: cycles(e),
        "%globaltimer": lambda: time(e),
        "%globaltimer_lo": lambda: b.cast("trunc", time(e), "i32"),
        "%globaltimer_hi": lambda: _high(e, time(e)),
    }
    if name not in plain:
        raise e.unsupported(why=name)
    return plain[name]()


SMS = 132  # multiprocessors, as an H200 has


def cycles(e: Lower) -> Value:
    """They are ahead as far as the nanoseconds."""
    return e.b.op("add", e.b.call("i64", "llvm.readcyclecounter"), e.grid_field("time_shift"))


def time(e: Lower) -> Value:
    """Nanoseconds of the device's clock, which may run ahead of the host's."""
    return e.b.call("i64", "drvkit_time", e.grid)


def _high(e: Lower, value: Value) -> Value:
    return e.b.cast("trunc", e.b.op("lshr", value, constant("i64", 32)), "i32")
