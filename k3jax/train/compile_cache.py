"""The folder of compiled programs, shared by all runs of a user."""

import os
from pathlib import Path

import jax

from k3jax.errors import UserError

OFF = "off"
# Several devices of one CPU. A large program of theirs that came from the folder was seen to wait
# forever, devices at different collectives (expert 8, jax 0.10.2); compiled anew it never did.
SIMULATED = "xla_force_host_platform_device_count"


def use_compile_cache(folder: str | None) -> Path | None:
    """Keep compiled programs in a folder and take them from there.

    Args:
        folder: the option; None takes the folder that jax was told by other means
            (JAX_COMPILATION_CACHE_DIR), else `k3jax/compiled` below the user's cache folder, except
            for simulated devices: their programs are kept only where it was asked for.

    Returns:
        The folder; None when programs are not kept.

    Raises:
        UserError: the folder that was asked for cannot be written.
    """
    if folder == OFF:
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if folder is None and jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    if folder is None and SIMULATED in os.environ.get("XLA_FLAGS", ""):
        return None
    path = default_folder() if folder is None else Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        if folder is None:  # no home to keep anything in: nobody asked for it
            return None
        raise UserError(
            f"compile_cache={folder}: {error.strerror}; name another folder, or `{OFF}`"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    return path


def default_folder() -> Path:
    """`k3jax/compiled` below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "k3jax" / "compiled"
