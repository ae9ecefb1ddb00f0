"""What `g4conformance describe` prints: what each scheme quantizes, and what the graphs of a runtime really hold."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from g4conformance.executors.registry import ALL_SCHEMES, EXECUTORS
from g4conformance.quantization.parameters import GraphQuantization, Quantization
from g4conformance.quantization.schemes import COVERAGE, SCHEMES, Scheme

_WIDTH = 140
_NO = "no"


def description() -> str:
    """Schemes, coverage and executors, as data of the package; no model is loaded."""
    return _printed([_schemes(SCHEMES.values()), _coverage(), _executors()])


def counted(quantization: Quantization) -> str:
    """The quantize and dequantize ops and the integers of each graph of a quantized runtime, counted in its program."""
    table = _table(
        f"{quantization.scheme.name}: counted in the converted graphs",
        ("graph", "linear ops", "with integer weights", "weight dtype", "largest |integer|", "quantize", "dequantize"),
    )
    for name, graph in quantization.graphs.items():
        table.add_row(name, *_counts(graph))
    return _printed([table])


def _counts(graph: GraphQuantization) -> list[str]:
    weights = [linear.weight.integers for linear in graph.linears.values() if linear.weight is not None]
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    largest = max((int(weight.abs().amax()) for weight in weights), default=0)
    return [
        str(len(graph.linears)),
        str(len(weights)),
        ", ".join(dtypes) or _NO,
        str(largest),
        str(graph.quantize_ops),
        str(graph.dequantize_ops),
    ]


def _schemes(schemes: Iterable[Scheme]) -> Table:
    table = _table("quantization schemes (--quant)", ("scheme", "weights", "activations", "logits"))
    for scheme in schemes:
        weights = f"int{scheme.weight_bits}, symmetric per output channel, at most ±{scheme.weight_max}"
        if scheme.activation_bits is None:
            table.add_row(scheme.name, weights, "floating point", "floating point")
        else:
            activations = f"int{scheme.activation_bits}, asymmetric per tensor, calibrated"
            table.add_row(scheme.name, weights, activations, f"int{scheme.logits_bits}")
    table.add_row("none", "floating point", "floating point", "floating point")
    return table


def _coverage() -> Table:
    table = _table(
        "what a scheme covers",
        ("graph", "linear ops: input, weight, output", "returned on a grid", "in floating point"),
    )
    for coverage in COVERAGE:
        name = f"{coverage.graph}<i>" if coverage.graph.endswith("layer/") else coverage.graph.rstrip("/")
        table.add_row(name, ", ".join(coverage.linears) or _NO, ", ".join(coverage.outputs) or _NO, coverage.floating)
    return table


def _executors() -> Table:
    """Which scheme each executor can express; the reasons of a refusal are given where it is."""
    table = _table("executors (--executor)", ("executor", "how it runs a graph", *ALL_SCHEMES, "dtypes", "pip install"))
    for executor in EXECUTORS.values():
        cells = [executor.refused_schemes.get(scheme, "yes") for scheme in ALL_SCHEMES]
        refused = [f"not {dtype}: {reason}" for dtype, reason in executor.refused_dtypes.items()]
        extra = "" if executor.extra is None else escape(f"g4conformance[{executor.extra}]")
        table.add_row(executor.name, executor.how, *cells, "; ".join(refused) or "all", extra)
    return table


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _printed(tables: Iterable[Table]) -> str:
    file = io.StringIO()
    console = Console(file=file, width=_WIDTH, no_color=True, highlight=False)
    for table in tables:
        console.print(table)
        console.print()
    return file.getvalue().rstrip()
