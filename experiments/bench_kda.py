"""Time KDA on this machine against plain spellings of it, in one process.

    python -m experiments.bench_kda            # 2 minutes, up to 7 GB (the plain scans)
    python -m experiments.bench_kda --quick    # a tenth of the length, 20 s
    python -m experiments.bench_kda --json results.json

Expected on two CPU cores at the default size (float32, B 1, T 4096, H 8, K = V 128): forward 2.6
times the fastest token scan (at least 1.5), forward and backward 27 times (at least 12) and 2.3
times `baseline_chunked` (at least 1.2); time per token at 16384 tokens within 1.2 of that at 1024.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.kda_baselines import TOKEN_SCANS, baseline_chunked
from experiments.timing import matmul_rate, time_interleaved
from pallas_kernels import kda

FORWARD, GRADIENT = "forward", "forward+backward"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Time KDA (implementation "xla") against token scans and a plain chunked scan.

    Every number is the median over rounds; in each round all forms run once, one after the other,
    so that other load on the machine meets them alike. Ratios above 1 mean that KDA is faster.
    """

    batch: int = 1
    """Rows (B)."""
    tokens: int = 4096
    """Tokens per row (T), a multiple of 64."""
    heads: int = 8
    """Heads (H)."""
    key_dim: int = 128
    """Key width per head (K)."""
    value_dim: int = 128
    """Value width per head (V)."""
    rounds: int = 5
    """Rounds of the fast forms and of every forward pass."""
    scan_rounds: int = 2
    """Rounds of the token scans with gradient, which take seconds each."""
    scaling: tuple[int, ...] = (1024, 4096, 16384)
    """Lengths at which time per token and memory are compared."""
    quick: bool = False
    """A tenth of the length and two rounds: checks that everything runs; the ratios mean little."""
    json: pathlib.Path | None = None
    """Also write all numbers to this file."""

    def __post_init__(self):
        if self.tokens < 64 or self.tokens % 64:
            raise ValueError(
                f"tokens={self.tokens} must be a multiple of 64, the chunk of the baseline; "
                f"try {max(64, self.tokens // 64 * 64)}"
            )
        if min(self.rounds, self.scan_rounds) < 1 or len(self.scaling) < 2:
            raise ValueError("rounds and scan_rounds must be at least 1, scaling needs two lengths")


def make_inputs(config: BenchConfig, tokens: int) -> tuple[jax.Array, ...]:
    """Return q, k (unit length), v, log_decay in (-5, 0) and beta in (0, 1), float32."""
    random = np.random.default_rng(0)
    shape = (config.batch, tokens, config.heads)
    q, k, logits = (random.normal(size=(*shape, config.key_dim)) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = random.normal(size=(*shape, config.value_dim))
    log_decay = -5 / (1 + np.exp(3 - logits))
    beta = 1 / (1 + np.exp(-random.normal(size=shape)))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta))


def compile_forms(function, inputs, which: str):
    """Compile the forward pass, or the gradient of sum(output * weight) in all five inputs."""
    if which == FORWARD:
        return jax.jit(lambda inputs: function(*inputs)).lower(inputs).compile()
    weight = jnp.asarray(np.random.default_rng(1).normal(size=inputs[2].shape), jnp.float32)

    def loss(inputs, weight):
        return jnp.sum(function(*inputs)[0] * weight)

    compiled = jax.jit(jax.value_and_grad(loss)).lower(inputs, weight).compile()
    run = functools.partial(
        lambda program, weight, inputs: program(inputs, weight), compiled, weight
    )
    run.memory_analysis = compiled.memory_analysis
    return run


def kda_operations(config: BenchConfig, which: str, chunk: int = 16) -> float:
    """Return the operations of the matrix products of the chunked form, recomputation included."""
    K, V = config.key_dim, config.value_dim
    forward = 2 * 2 * K * V + 2 * K * V + 2 * 2 * chunk * K + 2 * 2 * chunk * V
    backward = 6 * 2 * K * V + 2 * 2 * chunk * V + 2 * 2 * chunk * V + 4 * 2 * chunk * K
    per_token = forward if which == FORWARD else 2 * forward + backward
    return per_token * config.batch * config.tokens * config.heads


def measure(config: BenchConfig, console: Console) -> dict:
    """Run everything and return the numbers."""
    fast = functools.partial(kda, log_decay_min=-5.0, implementation="xla")
    forms = {"kda": fast, "baseline_chunked": baseline_chunked, **TOKEN_SCANS}
    inputs = make_inputs(config, config.tokens)
    result = {"config": dataclasses.asdict(config) | {"json": str(config.json)}, "seconds": {}}
    result["device"] = f"{jax.devices()[0].device_kind}, {jax.device_count()} device(s)"
    result["matmul_flops_per_second"] = rate = matmul_rate(2048, jnp.float32, config.rounds)
    result["fraction_of_matmul"] = {}
    for which in (FORWARD, GRADIENT):
        console.print(f"compiling and timing {which} of {len(forms)} forms ...")
        programs = {name: compile_forms(form, inputs, which) for name, form in forms.items()}
        # Gradients of token scans take seconds: fewer rounds, in which the others run repeatedly.
        rounds = config.rounds if which == FORWARD else config.scan_rounds
        fast_runs = -(-config.rounds // rounds)
        runs = {name: 1 if name in TOKEN_SCANS else fast_runs for name in forms}
        calls = {name: functools.partial(program, inputs) for name, program in programs.items()}
        seconds = time_interleaved(calls, rounds, runs=runs)
        result["seconds"][which] = seconds
        result["fraction_of_matmul"][which] = kda_operations(config, which) / seconds["kda"] / rate
    ratios = {}
    for which, seconds in result["seconds"].items():
        fastest = min(TOKEN_SCANS, key=seconds.get)
        ratios[which] = {
            "fastest_scan": fastest,
            "over_fastest_scan": seconds[fastest] / seconds["kda"],
            "over_baseline_chunked": seconds["baseline_chunked"] / seconds["kda"],
        }
    result["ratios"] = ratios
    console.print(f"timing {len(config.scaling)} lengths ...")
    result["scaling"] = measure_scaling(config, fast)
    return result


def measure_scaling(config: BenchConfig, fast) -> dict[str, dict[int, dict[str, float]]]:
    """Return time per token and temporary bytes per token at each length, interleaved."""
    inputs = {length: make_inputs(config, length) for length in config.scaling}
    scaling = {}
    for which in (FORWARD, GRADIENT):
        programs = {n: compile_forms(fast, inputs[n], which) for n in config.scaling}
        # As many tokens of each length: short programs run more often.
        runs = {length: max(1, max(config.scaling) // length) for length in config.scaling}
        calls = {n: functools.partial(program, inputs[n]) for n, program in programs.items()}
        seconds = time_interleaved(calls, config.rounds, runs=runs)
        scaling[which] = {
            length: {
                "microseconds_per_token": seconds[length] / length / config.batch * 1e6,
                "temporary_bytes_per_token": program.memory_analysis().temp_size_in_bytes
                / length
                / config.batch,
            }
            for length, program in programs.items()
        }
    return scaling


def print_report(result: dict, console: Console) -> None:
    """Print the tables and the ratios that matter."""
    seconds = result["seconds"]
    config = result["config"]
    table = Table(
        title=f"KDA, float32, B {config['batch']}, T {config['tokens']}, H {config['heads']}, "
        f"K {config['key_dim']}, V {config['value_dim']}, {result['device']}"
    )
    for column in ("form", FORWARD, "x kda", GRADIENT, "x kda"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for name in seconds[FORWARD]:
        cells = []
        for which in (FORWARD, GRADIENT):
            cells.append(f"{seconds[which][name] * 1e3:.1f} ms")
            cells.append(f"{seconds[which][name] / seconds[which]['kda']:.2f}")
        table.add_row(name, *cells)
    console.print(table)
    table = Table(title="kda at other lengths")
    for column in ("T", FORWARD, GRADIENT, "temporaries of forward+backward"):
        table.add_column(column, justify="right")
    for length, forward in result["scaling"][FORWARD].items():
        both = result["scaling"][GRADIENT][length]
        table.add_row(
            str(length),
            f"{forward['microseconds_per_token']:.2f} us/token",
            f"{both['microseconds_per_token']:.2f} us/token",
            f"{both['temporary_bytes_per_token']:.0f} bytes/token",
        )
    console.print(table)
    console.print(f"2048^3 float32 matmul: {result['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s")
    for which, fraction in result["fraction_of_matmul"].items():
        console.print(
            f"{which}: matrix products of kda, recomputed ones too, at {fraction:.0%} of it"
        )
    for which, ratio in result["ratios"].items():
        console.print(
            f"{which}: {ratio['over_fastest_scan']:.2f} x the fastest scan "
            f"({ratio['fastest_scan']}), {ratio['over_baseline_chunked']:.2f} x baseline_chunked"
        )
    lengths = list(result["scaling"][GRADIENT])
    for which in (FORWARD, GRADIENT):
        first, last = (result["scaling"][which][n] for n in (lengths[0], lengths[-1]))
        growth = last["microseconds_per_token"] / first["microseconds_per_token"]
        console.print(
            f"{which}: time per token at {lengths[-1]} is {growth:.2f} x that at {lengths[0]}"
        )


def main(config: BenchConfig) -> None:
    """Measure, print, and write the numbers if asked."""
    if config.quick:
        small = {"tokens": 448, "rounds": 2, "scan_rounds": 1, "scaling": (256, 1024)}
        config = dataclasses.replace(config, **small)
    console = Console()
    if config.json is not None and not config.json.parent.is_dir():
        raise SystemExit(f"--json {config.json}: the folder {config.json.parent} does not exist")
    result = measure(config, console)
    print_report(result, console)
    if config.json is not None:
        config.json.write_text(json.dumps(result, indent=2, default=list) + "\n")
        console.print(f"numbers written to {config.json}")


if __name__ == "__main__":
    main(tyro.cli(BenchConfig))
