"""Which implementation of an op runs: one table, read before anything runs.

A name that the caller gives is used or refused, never replaced; `None` reads the table. Nothing
here looks at array values, so the choice is the same under `jit` and outside of it.
"""

# Every implementation a kernel folder may hold, fastest device last.
IMPLEMENTATIONS = ("reference", "xla", "mosaic_tpu", "mosaic_gpu")

# op -> (implementations that exist, the one that `None` chooses).
BUILT = {
    "attention_residual": (("reference", "xla"), "xla"),
    "grouped_matmul": (("reference", "xla"), "xla"),
    "kda": (("reference", "xla"), "xla"),
    "mla_attention": (("reference", "xla"), "xla"),
    "mxfp4": (("reference", "xla"), "xla"),
    "short_conv": (("reference", "xla"), "xla"),
}


def choose_implementation(op: str, implementation: str | None) -> str:
    """Return the name of the implementation of `op` that runs.

    Args:
        op: public name of the op, a key of `BUILT`.
        implementation: a name of `IMPLEMENTATIONS`, or None for the table's choice.

    Raises:
        ValueError: the name is no implementation at all.
        NotImplementedError: the name is known but not built for this op.
    """
    built, default = BUILT[op]
    if implementation is None:
        return default
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown; use None or one of "
            f"{', '.join(built)}"
        )
    if implementation not in built:
        raise NotImplementedError(
            f"{op}: implementation={implementation!r} is not built; use None or one of "
            f"{', '.join(built)}"
        )
    return implementation
