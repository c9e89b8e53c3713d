"""How the chunked form cuts a sequence: a table, read before anything runs."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Static choices of one call.

    Attributes:
        bounded: the decay has a bound that the split at the middle of a chunk can hold.
        chunk: tokens that are one set of matrix products, a power of two.
        group: chunks between two stored states. More store less, and make a larger program.
    """

    bounded: bool
    chunk: int
    group: int

    @property
    def group_tokens(self) -> int:
        """Tokens between two stored states."""
        return self.chunk * self.group


# Lowest log decay per token -> chunk of the split at the middle row: 8 rows of -5 are e^40 on
# either side, which float32 holds with room for the values.
_BOUNDED_CHUNK = {-5.0: 16}

# Without a bound, or with a lower one, chunks split at the borders of blocks, right for any decay.
_UNBOUNDED_CHUNK = 16

# Chunks between two stored states, which cost K * V / (chunk * group) numbers per token and head:
# at 128, 2 and 4 times what v costs. The program grows with the group; the unbounded split has a
# larger one, and gains nothing from more than two.
_BOUNDED_GROUP, _UNBOUNDED_GROUP = 4, 2


def choose_schedule(num_tokens: int, log_decay_min: float | None) -> Schedule:
    """Choose by the promise on the decay and the length (short sequences need no full group)."""
    fitting = [
        chunk
        for bound, chunk in _BOUNDED_CHUNK.items()
        if log_decay_min is not None and log_decay_min >= bound
    ]
    chunk = max(fitting, default=_UNBOUNDED_CHUNK)
    num_chunks = -(-num_tokens // chunk)
    num_groups = -(-num_chunks // (_BOUNDED_GROUP if fitting else _UNBOUNDED_GROUP))
    # Equal groups with as little padding as possible.
    return Schedule(bounded=bool(fitting), chunk=chunk, group=-(-num_chunks // num_groups))
