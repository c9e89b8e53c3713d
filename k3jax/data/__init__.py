"""Text on disk to batches of packed rows: corpus, split, packing, loading, count baselines."""
