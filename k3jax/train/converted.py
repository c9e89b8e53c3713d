"""Runs that were converted from a released checkpoint: weights, and nothing to resume.

Such a run directory has a `config.json` with the key "converted" in place of "train" and
"corpus", and one checkpoint, step 0. Its weights are orbax checkpoints of some variables each,
`checkpoints/0/weights/<number>/`, so that writing them needs the memory of one and goes on after
an interruption; together they hold each variable once, as nested dictionaries of names.
"""

import dataclasses
import logging
import threading
from functools import partial
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

import meshes
from k3jax.checkpoint.hf import fill_model
from k3jax.checkpoint.names import placements, with_decay_shape
from k3jax.checkpoint.place import variable_sharding
from k3jax.checkpoint.run import find_damage
from k3jax.checkpoint.source import Source
from k3jax.checkpoint.tensors import ArrayTensor
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model import K3, abstract_model, pack_experts
from k3jax.nn.parameters import named_variables

STEP = "0"
WEIGHTS = "weights"
# An array is stored in pieces of this size: one in the usual case, as cutting copies it, several
# where a device that restores its slice would have to read far too much.
CHUNK_BYTES = 1 << 32
HELD_PARTS = 2  # codes and scales of a matrix may lie in neighbouring parts


class ConvertedWeights:
    """The weights of a converted run.

    Args:
        folder: `checkpoints/0/` of the run.
        described: what its config.json says.

    Raises:
        UserError: a file is damaged or missing.
    """

    def __init__(self, folder: Path, described: dict):
        problem = find_damage(folder)
        if problem is not None:
            raise UserError(f"{folder} is damaged ({problem}); convert the checkpoint again")
        facts = described["converted"]
        self.packed: bool = facts["packed"]
        cfg = K3Config.from_hf_dict(described["model"])
        self.cfg = with_decay_shape(cfg, tuple(facts["decay_shape"]))
        self._part_of: dict[str, Path] = {}
        self._abstract: dict[str, jax.ShapeDtypeStruct] = {}
        with ocp.StandardCheckpointer() as reader:
            for part in sorted((folder / WEIGHTS).absolute().iterdir()):
                tree = reader.metadata(part).item_metadata.tree
                for name, leaf in traverse_util.flatten_dict(tree, sep=".").items():
                    self._part_of[name] = part
                    self._abstract[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        self._held: dict[Path, dict[str, np.ndarray]] = {}
        self._lock = threading.Lock()

    def model(self) -> K3:
        """The model, on the mesh in force."""
        abstract = abstract_model(self.cfg)
        abstract = pack_experts(abstract) if self.packed else abstract
        variables, rules = named_variables(abstract), meshes.AxisRules()
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = {
            name: variable_sharding(name, variable, rules) or here
            for name, variable in variables.items()
        }
        values: dict[str, jax.Array] = {}
        for part in sorted(set(self._part_of.values())):
            values |= self._restore(part, shardings)
        return fill_model(abstract, values)

    def source(self) -> Source:
        """The tensors under their released names, read part by part when they are needed."""
        table = {p.released: p for p in placements(self.cfg, packed=self.packed)}
        tensors = {
            name: ArrayTensor(
                p, partial(self._fetch, p.variable, p.index), self._abstract[p.variable].dtype
            )
            for name, p in table.items()
        }
        return Source(cfg=self.cfg, packed=self.packed, placements=table, tensors=tensors)

    def in_order(self, source: Source) -> Source:
        """The tensors ordered by variable, so that each part is read once."""
        rank: dict[str, int] = {}
        for name in self._part_of:
            rank.setdefault(_matrix_name(name), len(rank))
        table = source.placements
        names = sorted(table, key=lambda n: (rank[_matrix_name(table[n].variable)], table[n].index))
        return dataclasses.replace(source, tensors={n: source.tensors[n] for n in names})

    def _fetch(self, name: str, index: tuple[int, ...]) -> np.ndarray:
        part = self._part_of[name]
        with self._lock:
            if part not in self._held:
                while len(self._held) >= HELD_PARTS:
                    del self._held[next(iter(self._held))]
                host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
                arrays = self._restore(part, dict.fromkeys(self._part_of, host))
                self._held[part] = {n: np.asarray(array) for n, array in arrays.items()}
            return self._held[part][name][index]

    def _restore(self, part: Path, shardings: dict) -> dict[str, jax.Array]:
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
            for name, leaf in self._abstract.items()
            if self._part_of[name] == part
        }
        with ocp.StandardCheckpointer() as reader:
            tree = reader.restore(part, traverse_util.unflatten_dict(wanted, sep="."))
        return traverse_util.flatten_dict(tree, sep=".")


def write_part(folder: Path, arrays: dict[str, jax.Array]) -> None:
    """Save variables as one orbax checkpoint; `folder` appears when it is complete."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports each save
    tree = traverse_util.unflatten_dict(arrays, sep=".")
    # Packed bytes and random mantissas do not compress; trying costs more than writing.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    chunked = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with ocp.Checkpointer(handler) as writer:
        writer.save(folder.absolute(), ocp.args.PyTreeSave(tree, save_args=chunked), force=True)


def _matrix_name(variable: str) -> str:
    """The name of a matrix, packed or not."""
    return variable.removesuffix(".codes").removesuffix(".scales")
