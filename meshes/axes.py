"""The six mesh axes. All of them always exist; an unused one has size 1."""

STAGE = "stage"  # pipeline stages
DATA = "data"  # replicas of everything
FSDP = "fsdp"  # batch rows, with parameters and optimizer state sharded
EXPERT = "expert"  # routed experts
CONTEXT = "context"  # tokens of one sequence
TENSOR = "tensor"  # heads, hidden widths, vocabulary

AXES = (STAGE, DATA, FSDP, EXPERT, CONTEXT, TENSOR)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
