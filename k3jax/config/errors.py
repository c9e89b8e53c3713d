"""The error of a configuration file that cannot be read as one of the two families."""

from k3jax.errors import UserError


class ConfigError(UserError):
    """A `config.json` is missing, malformed, or says something the model does not implement."""
