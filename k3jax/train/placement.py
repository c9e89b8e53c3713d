"""Where a run's arrays live: one device, or a mesh over all devices of all processes."""

import contextlib

import jax
import numpy as np

import meshes
from k3jax.errors import UserError
from k3jax.train.machines import MeshConfig, check_mesh


class Placement:
    """The mesh of a run, and how batches of rows get onto it.

    Args:
        mesh: the sizes asked for; a mesh of one device is no mesh.
        rows: rows that are computed at once.

    Raises:
        UserError: the mesh does not fit the devices or the rows.
    """

    def __init__(self, mesh: MeshConfig, rows: int):
        self.mesh = None
        if mesh.num_devices > 1 or jax.process_count() > 1:
            check_mesh(mesh, jax.device_count(), rows)
            try:
                self.mesh = meshes.build_mesh(mesh.shape())
            except ValueError as error:  # a torus or slices that it does not fit
                raise UserError(str(error)) from error

    def scope(self):
        """Context in which the mesh is in force."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @property
    def num_devices(self) -> int:
        """Devices that compute."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def everywhere(self) -> jax.NamedSharding | None:
        """Complete on every device; None without a mesh."""
        return None if self.mesh is None else jax.NamedSharding(self.mesh, jax.P())

    def own_rows(self, shape: tuple[int, int]) -> np.ndarray:
        """Which rows of a batch [B, T] the devices of this process hold, ascending."""
        if self.mesh is None:
            return np.arange(shape[0])
        held = self._sharding(("batch", "tokens"), shape).addressable_devices_indices_map(shape)
        numbers = np.arange(shape[0])
        return np.unique(np.concatenate([numbers[index[0]] for index in held.values()]))

    def put(self, arrays: dict, *, batch: int, rows: np.ndarray | None = None) -> dict:
        """Host arrays as arrays of the mesh: [B, T] by rows and tokens, others on every device.

        Args:
            arrays: "media" (the pictures of the whole batch) and arrays [rows, T].
            batch: rows of the whole batch, B.
            rows: which of them the arrays hold; all by default.
        """
        if self.mesh is None:
            return arrays
        rows = np.arange(batch) if rows is None else rows

        def put_rows(array):
            shape = (batch, *array.shape[1:])

            def part(index):
                wanted = np.arange(batch)[index[0]]
                return array[np.searchsorted(rows, wanted)][:, index[1]]

            sharding = self._sharding(("batch", "tokens"), shape)
            return jax.make_array_from_callback(shape, sharding, part)

        def put_whole(array):
            return jax.make_array_from_callback(
                array.shape, self.everywhere, lambda index: array[index]
            )

        return {
            name: jax.tree.map(put_whole if name == "media" else put_rows, value)
            for name, value in arrays.items()
        }

    def abstract(self, arrays: dict, batch: int) -> dict:
        """Shapes, types and places of what `put` makes of such arrays."""
        if self.mesh is None:
            return arrays

        def place(name, leaf):
            shape, sharding = leaf.shape, self.everywhere
            if name != "media":
                shape = (batch, *leaf.shape[1:])
                sharding = self._sharding(("batch", "tokens"), shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return {
            name: jax.tree.map(lambda leaf, name=name: place(name, leaf), value)
            for name, value in arrays.items()
        }

    def whole(self, arrays: dict) -> dict:
        """Every array complete on the first device of this process, out of the mesh.

        All processes call this: it gathers.
        """
        if self.mesh is None:
            return arrays
        gather = jax.jit(lambda x: x, out_shardings=self.everywhere)
        device = jax.local_devices()[0]
        result = {}
        for name, array in arrays.items():  # one at a time: copies on all devices are short-lived
            result[name] = jax.device_put(np.asarray(gather(array)), device)
        return result

    def _sharding(self, dims: tuple[str, ...], shape: tuple[int, ...]) -> jax.NamedSharding:
        """By the rules, but a dimension that does not divide is whole (one row, odd lengths)."""
        rules = meshes.AxisRules()
        entries = []
        for name, size in zip(dims, shape):
            try:
                entries.append(rules.place((name,), (size,), self.mesh.shape)[0])
            except ValueError:
                entries.append(None)
        return jax.NamedSharding(self.mesh, jax.P(*entries))
