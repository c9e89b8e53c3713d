"""`k3jax inspect`: a model in numbers, from its configuration (and file headers) alone."""

import dataclasses
import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from k3jax.checkpoint.contents import StoredTensors, read_stored
from k3jax.cli.command import run_command
from k3jax.cli.target import Target, resolve_target
from k3jax.errors import UserError
from k3jax.plan import (
    count_cache_bytes,
    count_flops_per_token,
    count_parameters,
    describe_blocks,
    describe_layers,
)


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Print what a model is and costs: layers, parameters, FLOPs per token, cache bytes.

    Nothing is allocated and no weight is read, so the 2.8T model takes as long as the tiny one.
    Examples: k3jax inspect kimi_k3 --length 131072; k3jax inspect runs/tiny --json
    """

    target: Annotated[str, tyro.conf.Positional]
    """Preset (kimi_k3, kimi_linear_48b, small, tiny), config.json, checkpoint or run directory."""
    length: int = 8192
    """Tokens of the sequence for FLOPs and cache."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Storage type of convolution tails and MLA latents; the KDA state is always float32."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> int:
        """Print the report."""
        if self.length <= 0:
            raise UserError(f"--length={self.length} must be positive")
        target = resolve_target(self.target)
        stored = read_stored(target.folder) if target.kind == "checkpoint" else None
        facts = describe(target, stored, length=self.length, dtype=self.dtype)
        if self.json:
            print(json_format.dumps(facts, indent=2))
        else:
            _show(facts)
        return 0


def main(arguments: Sequence[str]) -> int:
    """Run `k3jax inspect` with the arguments after its name."""
    return run_command(Inspect, "inspect", arguments)


def describe(
    target: Target, stored: StoredTensors | None, *, length: int, dtype: str
) -> dict[str, Any]:
    """Everything the command prints, as plain data: the `--json` output."""
    cfg = target.cfg
    counts = count_parameters(cfg)
    flops = count_flops_per_token(cfg, length=length)
    cache = count_cache_bytes(cfg, length=length, dtype=dtype)
    facts: dict[str, Any] = {
        "target": target.name,
        "kind": target.kind,
        "model_type": cfg.model_type,
        "layers": {
            "pattern": describe_layers(cfg),
            "total": cfg.num_layers,
            "kda": len(cfg.kda_layers),
            "mla": len(cfg.full_attention_layers),
            "moe": cfg.num_moe_layers,
            "experts": cfg.moe.num_experts if cfg.moe else 0,
            "experts_per_token": cfg.moe.experts_per_token if cfg.moe else 0,
            "shared_experts": cfg.moe.num_shared_experts if cfg.moe else 0,
            "dim": cfg.dim,
            "vocab_size": cfg.vocab_size,
            "residual_blocks": [
                {"first": span[0], "last": span[-1], "layers": letters}
                for span, letters in describe_blocks(cfg)
            ],
        },
        "parameters": {
            "parts": {name: dataclasses.asdict(part) for name, part in counts.parts.items()},
            "text": dataclasses.asdict(counts.text),
            "text_without_embedding": dataclasses.asdict(counts.text_without_embedding),
            "vision": counts.vision,
            "total": counts.total,
        },
        "flops_per_token": {
            **dataclasses.asdict(flops),
            "forward": flops.forward,
            "training": flops.training,
        },
        "cache_bytes": {
            **dataclasses.asdict(cache),
            "latents": cache.latents,
            "total": cache.total,
            "per_token": cache.per_token,
        },
    }
    if stored is not None:
        facts["stored"] = {**dataclasses.asdict(stored), "num_bytes": stored.num_bytes}
    if target.kind == "run":
        facts["checkpoints"] = _checkpoint_steps(target.folder)
    return facts


def _checkpoint_steps(run: Path) -> list[int]:
    folder = run / "checkpoints"
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(name) for name in names if name.isdecimal())


def _show(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{facts['target']}[/] ({facts['kind']}, {facts['model_type']})\n")
    _show_layers(console, facts["layers"])
    _show_parameters(console, facts["parameters"])
    _show_flops(console, facts["flops_per_token"])
    _show_cache(console, facts["cache_bytes"])
    if "stored" in facts:
        _show_stored(console, facts["stored"])
    if "checkpoints" in facts:
        steps = ", ".join(map(str, facts["checkpoints"])) or "none"
        console.print(f"[bold]Checkpoints[/] at steps: {steps}")


def _show_layers(console: Console, layers: dict[str, Any]) -> None:
    console.print(
        f"[bold]Layers[/]  {layers['pattern']}\n"
        f"  {layers['total']} layers of width {layers['dim']}: {layers['kda']} KDA (K), "
        f"{layers['mla']} MLA (M); small letter: no experts"
    )
    if layers["moe"]:
        console.print(
            f"  {layers['moe']} with experts: {layers['experts_per_token']} of "
            f"{layers['experts']} per token and {layers['shared_experts']} shared"
        )
    if layers["residual_blocks"]:
        console.print("  attention residuals, one stored vector per block (0-based layers):")
        table = _table()
        for block in layers["residual_blocks"]:
            table.add_row(f"{block['first']}–{block['last']}", block["layers"])
        console.print(Padding(table, (0, 0, 0, 2)))
    console.print()


def _show_parameters(console: Console, parameters: dict[str, Any]) -> None:
    console.print("[bold]Parameters[/]")
    table = _table("part", "total", "", "active per token", "", numeric=True)
    rows = dict(parameters["parts"])
    rows["text"] = parameters["text"]
    rows["text without embedding"] = parameters["text_without_embedding"]
    for name, part in rows.items():
        total, active = part["total"], part["active"]
        style = "bold" if name.startswith("text") else ""
        table.add_row(
            name, f"{total:,}", shorten(total), f"{active:,}", shorten(active), style=style
        )
    if parameters["vision"]:
        vision = parameters["vision"]
        table.add_row("vision and projector", f"{vision:,}", shorten(vision), "", "", style="bold")
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print()


def _show_flops(console: Console, flops: dict[str, Any]) -> None:
    console.print(
        f"[bold]FLOPs per token[/] (multiply-add = 2; mean over {flops['length']:,} causal tokens)"
    )
    table = _table("part", "forward", numeric=True)
    for name in ("projections", "attention", "recurrence", "other", "forward"):
        table.add_row(name, shorten(flops[name]), style="bold" if name == "forward" else "")
    table.add_row("training (3 × forward)", shorten(flops["training"]), style="bold")
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print()


def _show_cache(console: Console, cache: dict[str, Any]) -> None:
    console.print(
        f"[bold]Decoding state of one sequence[/] of {cache['length']:,} tokens ({cache['dtype']})"
    )
    table = _table("part", "bytes", "", numeric=True)
    rows = {
        "KDA state (float32, any length)": cache["kda_state"],
        "convolution tails (any length)": cache["conv_tails"],
        f"MLA latents ({cache['latents_per_token']:,} bytes per token)": cache["latents"],
        "total": cache["total"],
        "total per token": round(cache["per_token"]),
    }
    for name, count in rows.items():
        style = "bold" if name.startswith("total") else ""
        table.add_row(name, f"{count:,}", shorten(count), style=style)
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print()


def _show_stored(console: Console, stored: dict[str, Any]) -> None:
    types = ", ".join(f"{name} {shorten(n)}B" for name, n in stored["bytes_by_dtype"].items())
    console.print(
        f"[bold]Stored[/] {stored['num_tensors']:,} tensors in {stored['num_files']} files, "
        f"{shorten(stored['num_bytes'])}B ({types or 'no tensor'})"
    )
    if stored["missing_files"]:
        missing = stored["missing_files"]
        console.print(f"  [red]the index names {len(missing)} missing files[/], first {missing[0]}")
    experts = {
        "packed": "routed experts packed (MXFP4)",
        "dequantized": "routed experts as numbers",
        None: "no routed experts",
    }[stored["experts"]]
    vision = "with vision tower" if stored["vision"] else "text only"
    checksums = "checksums recorded" if stored["checksums"] else "no checksums recorded"
    console.print(f"  {experts}; {vision}; {checksums}")
    table = _table("part", "bytes", "", numeric=True)
    for name, count in stored["bytes_by_part"].items():
        table.add_row(name, f"{count:,}", shorten(count), style="red" if name == "unknown" else "")
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print()


def _table(*columns: str, numeric: bool = False) -> Table:
    table = Table(box=None, show_header=bool(columns), pad_edge=False, padding=(0, 1))
    for index, column in enumerate(columns or ("", "")):
        justify = "right" if numeric and index else "left"
        table.add_column(column, justify=justify, no_wrap=numeric)
    return table


def shorten(count: float) -> str:
    """Three significant digits with a decimal unit: 2779484476000 -> 2.78T."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999.5 and more of a unit would print as 1e+03 of it.
        if count >= size * 0.9995:
            value = count / size
            digits = max(0, 2 - (value >= 9.995) - (value >= 99.95))
            return f"{value:.{digits}f}{unit}"
    return f"{count:.0f}"
