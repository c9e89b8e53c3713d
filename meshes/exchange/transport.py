"""Which transport moves rows and experts, and what each of them refuses."""

import jax

TRANSPORTS = ("ragged", "padded", "gather", "hierarchical")
MODES = ("balanced", "plain")

# Forms that hold more than their share on every device are for tests and small models.
LARGEST_BUFFER = 2 * 2**30  # bytes


def current_platform() -> str | None:
    """Platform of the mesh in force (real or described); without a mesh jax's default backend.

    None for an abstract mesh, of which nobody has said what its devices are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    described = getattr(mesh, "abstract_device", None)
    if described is not None and described.platform:
        return described.platform
    return jax.default_backend() if mesh.empty else None


def choose_transport(platform: str | None = None) -> str:
    """What `transport=None` means: "ragged" on TPU and GPU, "padded" on CPU, which has no ragged.

    Args:
        platform: for example "tpu"; default: `current_platform()`, else jax's default backend.
    """
    platform = platform or current_platform() or jax.default_backend()
    return "padded" if platform == "cpu" else "ragged"


def check_transport(
    transport: str | None, *, mode: str, num_ranks: int, num_experts: int, node_size: int | None
) -> str:
    """The transport to use.

    Raises:
        ValueError: it does not exist here, or a size does not divide.
    """
    if mode not in MODES:
        raise ValueError(f"expert mode {mode!r} is unknown; use one of {', '.join(MODES)}")
    if transport is None:
        transport = choose_transport()
    if transport not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise ValueError(f"transport={transport!r} is unknown; use one of {known} or None")
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts={num_experts} must be divisible by the expert axis size {num_ranks}; "
            "use another MeshShape(expert=...)"
        )
    if transport == "ragged" and current_platform() == "cpu":
        raise ValueError(
            "transport='ragged' does not exist on CPU (XLA has no ragged all-to-all there); use "
            "transport='padded', or None to let the platform decide"
        )
    if transport == "hierarchical" and node_size is None:
        raise ValueError("transport='hierarchical' needs node_size=, the ranks inside one node")
    if node_size is not None and (node_size < 1 or num_ranks % node_size):
        raise ValueError(
            f"node_size={node_size} must divide the expert axis size {num_ranks}, so that every "
            "node holds as many ranks"
        )
    return transport


def check_buffer(what: str, num_bytes: int) -> None:
    """Refuse a buffer of a test form that would not fit beside a model.

    Raises:
        ValueError: with the size, the limit and the transports that need no such buffer.
    """
    if num_bytes > LARGEST_BUFFER:
        raise ValueError(
            f"{what} would hold {num_bytes / 2**30:.2f} GiB on every device, more than the "
            f"{LARGEST_BUFFER / 2**30:.2f} GiB that this form may take; use transport='ragged' "
            "(TPU, GPU), more devices on the expert axis, or fewer tokens in one call"
        )
