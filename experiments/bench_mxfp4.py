"""Time products with one MXFP4 matrix against products with its bfloat16 copy, in one process.

    python -m experiments.bench_mxfp4              # 1 minute
    python -m experiments.bench_mxfp4 --json results.json

Expected on two CPU cores for 3072 x 3584 in both orientations: at 1 row no slower than the
bfloat16 product, at 1024 rows at most 1.5 times as long, at 16 and 128 rows at most the time of
decoding plus 1.2 times the bfloat16 product. The weights read are 0.27 of the bfloat16 bytes.
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

from experiments.timing import time_interleaved
from pallas_kernels import MXFP4, grouped_matmul
from pallas_kernels.mxfp4.xla import decode_columns

# What the packed product may take: this many times the bfloat16 product, and decodings on top.
LIMITS = {1: (1.0, 0), 16: (1.2, 1), 128: (1.2, 1), 1024: (1.5, 0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Time one packed matrix at several numbers of rows.

    Every number is the median over rounds; in each round all forms run once, one after the other,
    so that other load on the machine meets them alike.
    """

    shapes: tuple[tuple[int, int], ...] = ((3072, 3584), (3584, 3072))
    """Input and output widths of the matrices; inputs a multiple of 32."""
    rows: tuple[int, ...] = tuple(LIMITS)
    """Numbers of rows."""
    rounds: int = 15
    """Rounds in which every form runs once."""
    json: pathlib.Path | None = None
    """Also write all numbers to this file."""


def product_with_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """The plain spelling; w is [in, out]."""
    return x @ w


def product_transposed(x: jax.Array, w_t: jax.Array) -> jax.Array:
    """Bfloat16 operands and a float32 result, which XLA multiplies natively; w_t is [out, in]."""
    dimensions = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x, w_t, dimensions, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def product_fused(x: jax.Array, w_t: jax.Array) -> jax.Array:
    """A spelling that converts the weights inside the product, if there is one row."""
    return (x.astype(jnp.float32) @ w_t.astype(jnp.float32).T).astype(x.dtype)


def product_packed(x: jax.Array, packed: MXFP4) -> jax.Array:
    """The product under test, all rows in one group."""
    return grouped_matmul(x, packed, jnp.array([x.shape[0]]))


def compile_forms(num_rows: int, matrix: MXFP4) -> dict[str, tuple]:
    """Name of each form -> (compiled program, its arguments)."""
    packed = jax.tree.map(lambda a: a[None], matrix)
    w = jax.block_until_ready(jax.jit(MXFP4.dequantize)(matrix))
    w_t = jnp.asarray(np.asarray(w).T.copy())
    x = np.random.default_rng(1).normal(size=(num_rows, w.shape[0]))
    x = jnp.asarray(x, jnp.bfloat16)
    calls = {
        "bf16 x @ w": (product_with_rows, x, w),
        "bf16 transposed": (product_transposed, x, w_t),
        "bf16 fused": (product_fused, x, w_t),
        "decode": (MXFP4.dequantize, matrix),
        "decode columns": (lambda m: decode_columns(m.codes, m.scales, jnp.bfloat16), matrix),
        "packed": (product_packed, x, packed),
    }
    return {
        name: (jax.jit(call).lower(*arguments).compile(), arguments)
        for name, (call, *arguments) in calls.items()
    }


def measure(shape: tuple[int, int], num_rows: int, rounds: int) -> dict:
    """Times in milliseconds, bytes, and the ratios of one size."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    matrix = jax.tree.map(jnp.asarray, MXFP4.quantize(weights))
    forms = compile_forms(num_rows, matrix)
    calls = {
        name: functools.partial(program, *arguments) for name, (program, arguments) in forms.items()
    }
    times = {name: 1e3 * value for name, value in time_interleaved(calls, rounds).items()}
    fastest = min(times[name] for name in times if name.startswith("bf16"))
    decode = min(times["decode"], times["decode columns"])
    bfloat16_bytes = 2 * shape[0] * shape[1]
    result = {
        "shape": shape,
        "rows": num_rows,
        "milliseconds": times,
        "over_fastest_bf16": times["packed"] / fastest,
        "over_plain_bf16": times["packed"] / times["bf16 x @ w"],
        "weight_bytes_over_bf16": (matrix.codes.nbytes + matrix.scales.nbytes) / bfloat16_bytes,
        "temporary_bytes": forms["packed"][0].memory_analysis().temp_size_in_bytes,
    }
    if num_rows in LIMITS:
        products, decodings = LIMITS[num_rows]
        result["allowed_milliseconds"] = products * fastest + decodings * decode
    return result


def print_report(results: list[dict], console: Console) -> None:
    """Print one row per size and number of rows."""
    names = list(results[0]["milliseconds"])
    table = Table(
        title=f"milliseconds, {jax.devices()[0].device_kind}, {jax.device_count()} device"
    )
    for column in ("in x out", "rows", *names, "allowed", "x fastest bf16", "x plain bf16"):
        table.add_column(column, justify="right")
    for result in results:
        times = [f"{result['milliseconds'][name]:.2f}" for name in names]
        allowed = result.get("allowed_milliseconds")
        table.add_row(
            "{} x {}".format(*result["shape"]),
            str(result["rows"]),
            *times,
            "" if allowed is None else f"{allowed:.2f}",
            f"{result['over_fastest_bf16']:.2f}",
            f"{result['over_plain_bf16']:.2f}",
        )
    console.print(table)
    console.print("allowed: by the fastest bf16 form, and the faster decoding where it counts")
    for result in results:
        console.print(
            f"{result['shape']}, {result['rows']} rows: weights stored and read in "
            f"{result['weight_bytes_over_bf16']:.3f} of the bf16 bytes, temporaries "
            f"{result['temporary_bytes'] / 2**20:.1f} MiB"
        )


def main(config: BenchConfig) -> None:
    """Measure, print, and write the numbers if asked."""
    console = Console()
    if config.json is not None and not config.json.parent.is_dir():
        raise SystemExit(f"--json {config.json}: the folder {config.json.parent} does not exist")
    results = [
        measure(shape, num_rows, config.rounds)
        for shape in config.shapes
        for num_rows in config.rows
    ]
    print_report(results, console)
    if config.json is not None:
        config.json.write_text(json.dumps(results, indent=2) + "\n")
        console.print(f"numbers written to {config.json}")


if __name__ == "__main__":
    main(tyro.cli(BenchConfig))
