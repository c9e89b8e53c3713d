"""The ring of buffers through which one warpgroup feeds the others on Hopper."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla.mosaic_gpu_tile import GROUPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Buffers for tiles of tokens, which arrive and are freed as one.

    Attributes:
        name: of its barriers.
        tokens: of a tile.
        stages: tiles in flight.
        wide: name -> channels of what arrives as [tokens, channels].
        rows: name -> dtype of what arrives as [tokens].
    """

    name: str
    tokens: int
    stages: int
    wide: Mapping[str, int]
    rows: Mapping[str, jax.typing.DTypeLike]

    def scratch(self, dtype) -> dict:
        """Buffers and barriers by name."""
        wide = {
            name: plgpu.SMEM((self.stages, self.tokens, channels), dtype)
            for name, channels in self.wide.items()
        }
        rows = {
            name: plgpu.SMEM((self.stages, self.tokens), row) for name, row in self.rows.items()
        }
        return wide | rows | self.barriers(len(wide) + len(rows))

    def barriers(self, arrivals: int) -> dict:
        """Barriers by name, for tiles that arrive in so many copies."""
        return {
            f"{self.name}_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages),
            f"{self.name}_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=self.stages),
        }

    def take(self, scratch: dict, turn: jax.Array) -> None:
        """Wait until the place of this turn is free."""
        # Turn n waits for what turn n - stages brought.
        pl.when(turn >= self.stages)(
            lambda: plgpu.barrier_wait(scratch[f"{self.name}_free"].at[lax.rem(turn, self.stages)])
        )

    def drain(self, scratch: dict, num_turns: jax.Array) -> None:
        """Wait until the last of all turns has been read."""
        num_turns = jnp.maximum(num_turns, 0)
        lax.fori_loop(
            num_turns, num_turns + self.stages, lambda turn, _: self.take(scratch, turn), None
        )

    def put(self, scratch: dict, sources: dict, tile: jax.Array, turn: jax.Array) -> None:
        """Copy a tile of the sources, by name, once its place is free."""
        self.take(scratch, turn)
        slot = lax.rem(turn, self.stages)
        tokens = pl.ds(tile * self.tokens, self.tokens)
        full = scratch[f"{self.name}_full"].at[slot]
        for name in (*self.wide, *self.rows):
            plgpu.copy_gmem_to_smem(sources[name].at[tokens], scratch[name].at[slot], full)

    def wait(self, scratch: dict, slot: jax.Array) -> None:
        """Wait for the tile of this slot."""
        plgpu.barrier_wait(scratch[f"{self.name}_full"].at[slot])

    def free(self, scratch: dict, slot: jax.Array) -> None:
        """Say that this warpgroup has read the tile."""
        plgpu.barrier_arrive(scratch[f"{self.name}_free"].at[slot])


def fetch(
    rings: tuple[Ring, ...], scratch: dict, sources: dict, start: jax.Array, stop: jax.Array
) -> None:
    """Copy the tiles start..stop through the rings, in order, as places become free.

    Ends when the last has been read.
    """

    def step(tile, _):
        for ring in rings:
            ring.put(scratch, sources, tile, tile - start)

    lax.fori_loop(start, stop, step, None)
    for ring in rings:
        ring.drain(scratch, stop - start)
