"""``qevict show``: what a policy is made of, and what it will hold."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from qevict.cli.console import console, progress
from qevict.cli.policies import BudgetOption, DtypeOption, JsonOption, PolicyArgument, read_policy

if TYPE_CHECKING:
    from rich.table import Table

    from qevict.contracts.values import Geometry
    from qevict.engine.forecast import Forecast
    from qevict.engine.wiring import Wiring
    from qevict.policy import Policy

EXAMPLE = "Llama-3.1-8B"
"""Whose sizes are taken where no model is given; from its published configuration."""


def show(
    policy: PolicyArgument,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Take the sizes of this model's configuration.", show_default=f"sizes of {EXAMPLE}"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=10_000_000, help="Length of the row.")] = 4096,
    budget: BudgetOption = None,
    dtype: DtypeOption = None,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print the policy as a TOML file, to start from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a policy's parts, and the windows and bytes of a row by tier.

    Windows by tier are those right after a prompt of that many tokens.
    """
    if as_toml and as_json:
        raise typer.BadParameter("choose one of --toml and --json")
    chosen = read_policy(policy, budget, dtype)
    if as_toml:
        import qevict

        typer.echo(qevict.dumps(chosen), nl=False)
        return
    from qevict.engine.forecast import forecast

    wiring = _wiring(chosen, model)
    seen, name = forecast(wiring, tokens), model or EXAMPLE
    if as_json:
        typer.echo(json.dumps(_as_json(wiring, seen, name), indent=2))
    else:
        _print(wiring, seen, name)


def _wiring(policy: "Policy", model: str | None) -> "Wiring":
    from qevict.engine.wiring import Wiring

    if model is not None:
        from qevict.bench.models import load_sketch, quiet_libraries
        from qevict.hf.support import wire

        quiet_libraries()
        with progress(1) as tick:
            return wire(load_sketch(model, progress=tick), policy)
    wiring = Wiring(policy, _example_geometry(policy), None)
    wiring.check()
    return wiring


def _example_geometry(policy: "Policy") -> "Geometry":
    import torch

    from qevict.contracts.values import Geometry

    return Geometry(layers=32, q_heads=32, kv_heads=8, head_dim=128, dtype=policy.dtype or torch.bfloat16)


def _as_json(wiring: "Wiring", seen: "Forecast", model: str) -> dict[str, Any]:
    from qevict.config.document import write_document
    from qevict.registry import default_registry

    geometry = attrs.asdict(wiring.geometry) | {"dtype": str(wiring.geometry.dtype).removeprefix("torch.")}
    policy = write_document(wiring.policy, default_registry())
    return {"model": model, "geometry": geometry, "policy": policy, "forecast": attrs.asdict(seen)}


def _print(wiring: "Wiring", seen: "Forecast", model: str) -> None:
    screen = console()
    screen.print(_parts(wiring))
    screen.print()
    screen.print(_tiers(wiring.policy, seen))
    screen.print(f"\n{_summary(wiring, seen, model)}", highlight=False, markup=False)


def _parts(wiring: "Wiring") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    policy, dtype = wiring.policy, str(wiring.geometry.dtype).removeprefix("torch.")
    lanes = "all KV heads of a row together" if policy.granularity == "row" else "each KV head apart"
    when = f"every {policy.period_tokens}" if policy.route_at == "period" else "once, at the prompt's end"
    rows = {
        "scorer": repr(policy.scorer),
        "router": repr(policy.router),
        "ledger": repr(policy.ledger),
        "backend": f"{wiring.backend!r}: {wiring.choice.reason}",
        "budget": "no limit" if policy.budget is None else f"{policy.budget} per row, {policy.accounting} accounting",
        "windows": f"{policy.window_tokens} tokens, routed {when}, {lanes}",
        "protected": f"the first {policy.sink_tokens} tokens and the last {policy.protected_tokens}",
        "stored in": dtype,
    }
    table = Table.grid(padding=(0, 2))
    for label, text in rows.items():
        table.add_row(f"[bold]{label}[/bold]", escape(text))
    return table


def _tiers(policy: "Policy", seen: "Forecast") -> "Table":
    from rich import box
    from rich.table import Table

    from qevict.engine.report import PROTECTED_TIER
    from qevict.engine.tables import in_units

    table = Table("tier", "keys", "values", "store", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("a window", "windows", "bytes", "of a full cache"):
        table.add_column(heading, justify="right", no_wrap=True)
    tiers = {PROTECTED_TIER: ("full precision", "full precision", "", "")}
    for tier in policy.tiers:
        keys, values = (
            f"{each.name}, {each.bits} bits" if each else "full precision" for each in (tier.keys, tier.values)
        )
        tiers[tier.name] = (keys, values, tier.store.name, in_units(seen.window_bytes[tier.name]))
    for name, cells in tiers.items():
        count, share = seen.bytes_by_tier[name], seen.bytes_by_tier[name] / seen.full_bytes
        table.add_row(name, *cells, str(seen.windows[name]), in_units(count), f"{100 * share:.1f} %")
    table.add_row("evicted", "", "", "", "", str(seen.evicted_windows))
    return table


def _summary(wiring: "Wiring", seen: "Forecast", model: str) -> str:
    from qevict.engine.tables import in_units

    sizes = wiring.geometry
    lanes = sizes.layers * wiring.lanes_per_row
    limit = "no limit" if seen.budget_bytes is None else in_units(seen.budget_bytes)
    return (
        f"A row of {seen.tokens} tokens of {model} ({sizes.layers} layers, {sizes.q_heads} query and {sizes.kv_heads} "
        f"KV heads, head_dim {sizes.head_dim}): {lanes} lanes, windows summed over them. Full cache "
        f"{in_units(seen.full_bytes)}; budget {limit}, of which "
        f"{in_units(seen.floor_bytes)} go to what is never ranked (sinks, windows not aged, room until the next event, "
        "bookkeeping). A window: bytes in one lane, as billed."
    )
