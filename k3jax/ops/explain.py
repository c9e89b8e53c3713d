"""Which implementation of each kernel was chosen, for which device, and why."""

from pallas_kernels import Choice, choices_made

_COLUMNS = ("op", "implementation", "device", "reason")


class KernelChoices(tuple[Choice, ...]):
    """`Choice`s that print as a table, or say what there is when there are none."""

    def __repr__(self) -> str:
        if not self:
            made = choices_made()
            if not made:
                return "no kernel was chosen yet: call or trace a function first"
            ops, devices = ({getattr(c, key) for c in made} for key in ("op", "device"))
            return (
                f"no such choice was made; so far there are ops {', '.join(sorted(ops))} and "
                f"devices {', '.join(sorted(devices))}: call or trace a function first"
            )
        rows = [_COLUMNS, *(tuple(record.values()) for record in self.records())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        return "\n".join(
            "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()
            for row in rows
        )

    __str__ = __repr__

    def records(self) -> list[dict[str, str]]:
        """The same as dictionaries, for JSON."""
        return [{name: getattr(choice, name) for name in _COLUMNS} for choice in self]


def explain_kernels(*, op: str | None = None, device: str | None = None) -> KernelChoices:
    """Return which implementation each op has chosen in this process so far, and why.

    Choices are made while a function is traced, and say nothing about whether it then ran:

        jax.eval_shape(model, tokens)
        print(k3jax.explain_kernels())

    Args:
        op: only this op, "kda".
        device: only choices for this device, "cpu", "v6e" or "h200"; programs that are compiled
            ahead of time for other chips make choices of their own.

    Returns:
        a tuple of `pallas_kernels.Choice`, sorted by op, that prints as a table.
    """
    chosen = (c for c in choices_made() if op in (None, c.op) and device in (None, c.device))
    return KernelChoices(sorted(chosen, key=lambda choice: choice.op))
