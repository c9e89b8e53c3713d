"""The training state, and the model as a dictionary of named arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

import meshes
from k3jax.config import K3Config
from k3jax.nn.parameters import RouterBias, is_matrix, named_variables
from k3jax.train.precision import DEFAULT_PRECISION, PrecisionConfig

NAMED = ("params", "master", "rest")  # fields that are dictionaries by name


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step reads and writes; what a checkpoint holds."""

    params: dict[str, jax.Array]  # trained arrays by name
    master: dict[str, jax.Array]  # float32 copies of those in bfloat16, where kept
    rest: dict[str, jax.Array]  # the other variables by name: router biases, packed experts
    optimizer: object  # optax state
    step: jax.Array  # [] int32: steps done
    skipped: jax.Array  # [] int32: steps without an update so far
    skipped_in_row: jax.Array  # [] int32: those since the last update
    key: jax.Array  # random key data, uint32


class ModelParts:
    """Takes a model apart into named arrays and puts it together again, also under jit.

    Args:
        cfg: the model; its structure is read from an abstract instance.
        packed_experts: routed experts are MXFP4 constants (`k3jax.model.pack_experts`), to be
            found in `rest`.
        precision: types of the arrays.
    """

    def __init__(
        self,
        cfg: K3Config,
        *,
        packed_experts: bool = False,
        precision: PrecisionConfig = DEFAULT_PRECISION,
    ):
        from k3jax.model import init, pack_experts

        self.cfg, self.precision = cfg, precision
        start = functools.partial(init, dtype=precision.parameters)
        self._init = (lambda *args: pack_experts(start(*args))) if packed_experts else start
        # The key inside: a mesh of described devices computes nothing.
        template = jax.eval_shape(lambda: self._init(cfg, jax.random.key(0)))
        variables = named_variables(template)
        leaves, self._structure = jax.tree.flatten(template)
        if len(leaves) != len(variables):
            raise ValueError(
                f"the model has {len(leaves)} arrays but {len(variables)} named variables: an "
                "array is not in a Variable"
            )
        self.names = tuple(variables)
        self.param_names = tuple(n for n, v in variables.items() if isinstance(v, nnx.Param))
        self.matrix_names = frozenset(n for n in self.param_names if is_matrix(variables[n]))
        self.router_names = tuple(n for n, v in variables.items() if isinstance(v, RouterBias))

    def join(self, params: dict, rest: dict):
        """The model that holds these arrays."""
        return jax.tree.unflatten(
            self._structure,
            [params[name] if name in params else rest[name] for name in self.names],
        )

    def split(self, model) -> tuple[dict, dict]:
        """(params, rest): name -> array."""
        arrays = dict(zip(self.names, jax.tree.leaves(model), strict=True))
        params = {name: arrays.pop(name) for name in self.param_names}
        return params, arrays

    def fresh_state(self, optimizer, seed: int) -> TrainState:
        """Step 0: initial weights and optimizer state, from the seed alone."""
        init_key, run_key = jax.random.split(jax.random.key(seed))
        params, rest = self.split(self._init(self.cfg, init_key))
        return TrainState(
            params=params,
            master=jax.jit(self.precision.master_of)(params),
            rest=rest,
            optimizer=jax.jit(lambda p: optimizer.init(self.precision.as_moments(p)))(params),
            # Separate buffers: the step donates each of them.
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            skipped_in_row=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(run_key),
        )

    def abstract_state(self, optimizer) -> TrainState:
        """Shapes and types of a state, without computing one."""
        return jax.eval_shape(lambda: self.fresh_state(optimizer, 0))

    def placed_state(self, optimizer) -> TrainState:
        """`abstract_state` that says where each array lives: on the mesh in force, or one device.

        Arrays of the optimizer that belong to a parameter lie where it does.
        """
        abstract = self.abstract_state(optimizer)
        if not meshes.has_mesh():
            return with_sharding(abstract, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        mesh = meshes.mesh_in_force()

        def place(leaf):  # no sharding: the same on every device
            spec = jax.P() if leaf.sharding is None else leaf.sharding.spec
            sharding = jax.NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(place, abstract)


def to_tree(state: TrainState) -> dict:
    """A state as plain nested dictionaries of names, for a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(state.optimizer)
    optimizer = {_path_name(path): leaf for path, leaf in leaves}
    tree = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.name not in (*NAMED, "optimizer")
    }
    for name, flat in [(name, getattr(state, name)) for name in NAMED] + [("optimizer", optimizer)]:
        if flat or name != "master":  # without such copies the tree has no place for them
            tree[name] = traverse_util.unflatten_dict(flat, sep=".")
    return tree


def named_arrays(state: TrainState) -> dict:
    """Dotted name -> array, in one dictionary."""
    return traverse_util.flatten_dict(to_tree(state), sep=".")


def from_tree(tree: dict, like: TrainState) -> TrainState:
    """Inverse of `to_tree`; `like` (abstract is enough) gives the optimizer's structure."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(like.optimizer)]
    optimizer = traverse_util.flatten_dict(tree["optimizer"], sep=".")
    flat = {name: traverse_util.flatten_dict(tree.get(name, {}), sep=".") for name in NAMED}
    plain = {name: tree[name] for name in ("step", "skipped", "skipped_in_row", "key")}
    return TrainState(
        **plain,
        **flat,
        optimizer=jax.tree.unflatten(
            jax.tree.structure(like.optimizer), [optimizer[_path_name(path)] for path in paths]
        ),
    )


def with_sharding(abstract, sharding):
    """Abstract arrays that say where they shall live; restoring always names that."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract
    )


def _path_name(path) -> str:
    """`chain` entries are numbered, fields named: (1).mu["a.b"] becomes "1.mu.a.b"."""
    names = []
    for entry in path:
        for attribute in ("name", "idx", "key"):
            if hasattr(entry, attribute):
                names.append(str(getattr(entry, attribute)))
                break
    return ".".join(names)
