"""Weights and training state on disk: released safetensors, and the checkpoints of a run."""
