"""Training: the step, the loop, the run directory and its report."""
