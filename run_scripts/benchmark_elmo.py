"""How fast the tokenizer and the model are on real text: correctness first, then rounds in which all take turns.

python run_scripts/benchmark_elmo.py --text_file corpus.txt       (sentences, one a line; also .txt.gz, .jsonl)
python run_scripts/benchmark_elmo.py --parts inference memory --batches 128x30 --dtypes float32 bfloat16

Batches are named rows x longest sentence in words: 32x30 has sentences of 3 to 30 words, one of exactly 30; in
32x30dense all have 30. Tokens are words and markers. A busy machine slows all implementations of a round alike: compare
ratios between machines, not milliseconds. "x reference" is how many times as fast as the reference, "floor" the model's
matrix products and nothing else.

--peer MODULE:FUNCTION takes part with another ELMo; `peer_allennlp.py` is an example. MODULE is the path of a file or
an importable name. FUNCTION gets our float32 ELMoModel and returns, for the same weights, a dictionary of

  "model"       prepared -> the top layer (batch, time, 2 * projection_size), zeros at padding
  "prepare"     what the tokenizer returned, markers included -> prepared; not timed; default: as it is
  "encoder"     prepared -> token vectors (batch, time, projection_size); without it: not in the part `encoder`
  "parameters"  {name: weight}, all weights that `model` is differentiable in; of those with the name and shape of one
                of ours the gradients are compared; without it: not in the part `training`
"""

import argparse
import copy
import importlib
import json
import math
import platform
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from modeling_elmo import ELMoConfig, ELMoModel
from modeling_elmo.configuration_elmo import PRESETS
from modeling_elmo.run_scripts.benchmarks import parts as parts
from modeling_elmo.run_scripts.benchmarks.parts import FLOOR, Bench, Contest, Run, Sentence
from modeling_elmo.run_scripts.program.command_line import run as run_program
from modeling_elmo.run_scripts.program.files import read_file, require, write_json

Row = dict[str, Any]
DEFAULT_TEXT = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "text" / "en.txt"
DEFAULT_BATCHES = {"batches": ["1x20", "32x30", "32x30dense", "128x30"], "training_batches": ["32x20", "128x20"]}
SHORTEST, MOST_SENTENCES, MOST_OPERATORS = 3, 20_000, 12
# The share of its RMS by which an output may differ from the reference in float32: rounding, with random weights.
TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2}
SPEEDS = {"tokens_per_second", "words_per_second"}
FORMATS = {  # of the columns that tables have
    **dict.fromkeys(("operator", "calls", "implementation", "dtype"), "{}"),
    **dict.fromkeys(("milliseconds", "fastest", "slowest"), "{:,.1f}"),
    **dict.fromkeys(("weights_megabytes", "outputs_megabytes", "rise_megabytes"), "{:,.1f}"),
    **dict.fromkeys(SPEEDS, "{:,.0f}"),
    **dict.fromkeys(("multiple_of_weights_and_outputs", "multiple_at_two_weights"), "{:.2f}"),
    **dict.fromkeys(("share", "share_of_floor"), "{:.0%}"),
    "relative_rms_error": "{:.1e}",
}
PEER_KEYS = ("model", "prepare", "encoder", "parameters")


def main(arguments: list[str] | None = None):
    args = parse(arguments)
    if args.plot:
        require("matplotlib", extra="train", purpose="--plot")
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        bench = make_bench(args, Path(folder))
        figures: Row = {"conditions": conditions(args, bench), "rows": [], "profiles": {}}
        print(json.dumps(figures["conditions"]))
        for part in args.parts:
            figures["rows"] += [row for rows in measure_part(part, bench, args.rounds) for row in rows]
        for name in args.batches if args.profile else ():
            figures["profiles"][name] = profile(name, bench)
    if args.output:
        write_json(Path(args.output), figures)
    if args.plot:
        plot(figures["rows"], args.plot)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text_file", help="default: a short text that comes with a clone of the repository")
    parser.add_argument("--preset", choices=PRESETS, default="original", help="model size (random weights)")
    for name, batches in DEFAULT_BATCHES.items():
        default = f"default: {' '.join(batches)}"
        parser.add_argument(f"--{name}", nargs="+", default=batches, metavar="ROWSxWORDS", help=default)
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCES, default=["float32"], help="training: float32 alone")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[*parts.PARTS, "memory"],
        default=list(parts.PARTS),
        help="default: all but memory",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each implementation (default: 5)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: as many as it takes itself)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the choice of sentences")
    parser.add_argument("--peer", nargs="+", default=[], metavar="MODULE:FUNCTION", help="see above")
    parser.add_argument("--output", help="JSON file for all figures and their conditions")
    parser.add_argument("--plot", help="picture of the tokens per second: .png, .svg, ...")
    parser.add_argument("--profile", action="store_true", help="also which operators take the time of inference")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; pass 1 or more")
    if args.plot and not set(args.parts) - {"start", "memory"}:
        parser.error(f"--plot shows speeds, which {' and '.join(args.parts)} have not; add inference to --parts")
    return args


def make_bench(args: argparse.Namespace, folder: Path) -> Bench:
    sentences, wanted = read_sentences(args.text_file), set(args.parts)
    names = args.batches if args.profile or wanted - {"training", "tokenizer", "start"} else []
    training_names = args.training_batches if "training" in wanted else []
    batches, training_batches = (
        {name: draw(sentences, name, args.seed) for name in each} for each in (names, training_names)
    )
    torch.manual_seed(args.seed)
    model = ELMoModel(ELMoConfig.from_preset(args.preset), add_mixing_layer=False).eval()
    if wanted & {"start", "memory"}:
        model.save_pretrained(folder)
    others = {name: copy.deepcopy(model).to(getattr(torch, name)) for name in args.dtypes if name != "float32"}
    peers = dict(load_peer(spec, model) for spec in args.peer)
    return Bench(sentences, batches, training_batches, {"float32": model, **others}, args.dtypes, peers, folder)


def read_sentences(path: str | None) -> list[Sentence]:
    if path is None and not DEFAULT_TEXT.is_file():
        raise ValueError("Only a clone of the repository has a default text; pass --text_file, a sentence a line.")
    texts = (text for _, text in read_file(Path(path or DEFAULT_TEXT), "text"))
    words = (text.split() if isinstance(text, str) else text for text in texts)
    sentences = list(islice((sentence for sentence in words if len(sentence) >= SHORTEST), MOST_SENTENCES))
    if not sentences:
        raise ValueError(
            f"{path} has no sentence of {SHORTEST} words or more; pass a text file with one sentence a line."
        )
    return sentences


def draw(sentences: list[Sentence], name: str, seed: int) -> list[Sentence]:
    """The sentences of a batch. Longer ones are cut to its length where there are too few others."""
    parsed = re.fullmatch(r"([1-9]\d*)x(\d+)(dense)?", name)
    if not parsed or int(parsed[2]) < SHORTEST:
        raise ValueError(f"{name!r} is no batch: pass ROWSxWORDS or ROWSxWORDSdense with {SHORTEST} words or more.")
    rows, longest = int(parsed[1]), int(parsed[2])
    cut = [words[:longest] for words in sentences]
    full = [words for words in cut if len(words) == longest]
    uncut = [words for words in sentences if len(words) <= longest]
    pool = full if parsed[3] else uncut if len(uncut) >= rows else cut
    if not full or len(pool) < rows:
        raise ValueError(
            f"The text has too few sentences for a batch of {name}; pass a longer text or smaller batches."
        )
    generator = random.Random(f"{seed} {name}")
    first = generator.choice([words for words in uncut if len(words) == longest] or full)
    return [first, *generator.sample(pool, rows - 1)]


def load_peer(spec: str, model: ELMoModel) -> tuple[str, Row]:
    module, _, name = spec.rpartition(":")
    if not module or not name:
        raise ValueError(
            f"--peer {spec} is not MODULE:FUNCTION; write for example run_scripts/peer_allennlp.py:allennlp."
        )
    make = getattr(import_module(module), name, None)
    if not callable(make):
        raise ValueError(f"--peer {spec}: {module} has no function {name!r}.")
    peer = make(model)
    if not isinstance(peer, dict) or "model" not in peer or not peer.keys() <= set(PEER_KEYS):
        received = list(peer) if isinstance(peer, dict) else type(peer).__name__
        raise ValueError(
            f"--peer {spec} returned {received}; return a dictionary of 'model' and any of {PEER_KEYS[1:]}."
        )
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    weights = peer.get("parameters")
    if weights is not None and not any(shapes.get(key) == weight.shape for key, weight in weights.items()):
        raise ValueError(f"--peer {spec}: no parameter has the name and shape of one of ours; rename those alike.")
    return name, peer


def import_module(name: str):
    path = Path(name)
    if path.suffix != ".py":
        return importlib.import_module(name)
    if not path.is_file():
        raise FileNotFoundError(f"--peer: there is no file {name}; pass the path of a Python file or a module's name.")
    loader = SourceFileLoader(path.stem, name)
    module = module_from_spec(ModuleSpec(path.stem, loader))
    loader.exec_module(module)
    return module


def conditions(args: argparse.Namespace, bench: Bench) -> Row:
    # absent from older releases of torch
    processor = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {
        "text": Path(args.text_file or DEFAULT_TEXT).name,
        "preset": args.preset,
        "parameters": bench.models["float32"].num_parameters(),
        "dtypes": args.dtypes,
        "rounds": args.rounds,
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "processor": processor.get("cpu_name") or platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measure_part(part: str, bench: Bench, rounds: int) -> Iterator[list[Row]]:
    """The rows of each batch, shown as they come."""
    if part == "memory":
        for name in bench.batches if parts.can_measure_memory() else ():
            yield show(f"memory, {name}", list(parts.memory_rows(bench, name)))
        return
    for contest in parts.PARTS[part](bench):
        counts = (f"{count:,} {what.replace('_', ' ')}" for what, count in contest.counts.items())
        yield show(", ".join([part, contest.batch, *counts]), measure(contest, rounds))


def measure(contest: Contest, rounds: int) -> list[Row]:
    """A row for each run, if all are right."""
    checked = list(check(contest.runs))
    seconds = clock([run.call for run, _ in checked], rounds)
    rows = [row_of(contest, run, error, times) for (run, error), times in zip(checked, seconds, strict=True)]
    floors = {row["dtype"]: row["milliseconds"] for row in rows if row["implementation"] == FLOOR}
    firsts = {row["implementation"]: row["milliseconds"] for row in reversed(rows)}
    for row in rows:
        row["ratios"] = {base: firsts[base] / row["milliseconds"] for base in contest.bases if base in firsts}
        row["share_of_floor"] = floors[row["dtype"]] / row["milliseconds"] if row["dtype"] in floors else None
    return rows


def check(runs: list[Run]) -> Iterator[tuple[Run, float | None]]:
    """Each run and its error; those that this processor or this dtype has not are left out."""
    for run in runs:
        try:
            yield run, error_of(run)
        except ValueError as reason:
            if run.dtype != "bfloat16":
                raise
            print(f"\n{run.implementation} {run.dtype} is not measured: {reason}")


def error_of(run: Run) -> float | None:
    """The largest of its outputs' relative RMS errors, which must not be too large."""
    found = run.call()
    if run.expected is None:
        return None
    errors = {name: relative_rms(found[name], value) for name, value in run.expected.items() if name in found}
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] > TOLERANCES[run.dtype]:
        raise RuntimeError(
            f"{run.implementation} {run.dtype} differs from the reference by {errors[worst]:.1e} of its RMS "
            f"in {worst!r}, more than {TOLERANCES[run.dtype]:.0e}; no figures are given."
        )
    return errors[worst]


def relative_rms(found: Tensor, expected: Tensor) -> float:
    """Infinity for another shape, or for what is not a number."""
    if found.shape != expected.shape:
        return math.inf
    found, expected = found.float(), expected.float()
    error = ((found - expected).norm() / expected.norm().clamp(min=torch.finfo(expected.dtype).tiny)).item()
    return math.inf if math.isnan(error) else error


def clock(calls: list[Callable], rounds: int) -> list[list[float]]:
    """Seconds of each run; the calls take turns, and one round before does not count."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [times[1:] for times in seconds]


def row_of(contest: Contest, run: Run, error: float | None, seconds: list[float]) -> Row:
    median = statistics.median(seconds)
    return {
        "part": contest.part,
        "batch": contest.batch,
        "implementation": run.implementation,
        "dtype": run.dtype,
        "milliseconds": 1e3 * median,
        "fastest": 1e3 * min(seconds),
        "slowest": 1e3 * max(seconds),
        **contest.counts,
        **{f"{what}_per_second": count / median for what, count in contest.counts.items() if what != "distinct_words"},
        "relative_rms_error": error,
    }


def show(title: str, rows: list[Row]) -> list[Row]:
    """Prints a Markdown table with a column for whatever one of the rows has."""
    lines = [cells(row) for row in rows]
    headers = list(
        dict.fromkeys(header for line in lines for header in line if any(each.get(header) for each in lines))
    )
    table = [headers, *([line.get(header, "") for header in headers] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    print(f"\n### {title}\n")
    for texts in table:
        print("|", " | ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)), "|", flush=True)
    return rows


def cells(row: Row) -> dict[str, str]:
    shown = {key: "" if value is None else FORMATS[key].format(value) for key, value in row.items() if key in FORMATS}
    texts = {key.replace("_", " "): text for key, text in shown.items()}
    return texts | {f"x {base}": f"{ratio:.2f}" for base, ratio in row.get("ratios", {}).items()}


def profile(name: str, bench: Bench) -> list[Row]:
    """The operators that take most of the time of inference, what they call not counted."""
    call = partial(parts.inference, bench.models["float32"], "inference", parts.encode(bench.batches[name]))
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    rows = []
    for event in events[:MOST_OPERATORS]:
        took = event.self_cpu_time_total
        rows.append({"operator": event.key, "calls": event.count, "milliseconds": took / 1e3, "share": took / total})
    return show(f"profile of inference, {name}", rows)


def plot(rows: list[Row], path: str):
    """Tokens per second, a panel for each part, a group of bars for each batch."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    timed = [row for row in rows if SPEEDS & row.keys()]
    panels: dict[str, list[Row]] = {row["part"]: [] for row in timed}
    for row in timed:
        panels[row["part"]].append(row)
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, 2.5 * len(panels)), squeeze=False, layout="constrained")
    for axis, (part, own) in zip(axes[:, 0], panels.items(), strict=True):
        draw_panel(axis, part, own)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_panel(axis, part: str, rows: list[Row]):
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    names = list(dict.fromkeys((row["implementation"], row["dtype"]) for row in rows))
    width = 0.8 / max(len(names), 4)
    for number, (name, dtype) in enumerate(names):
        own = [row for row in rows if (row["implementation"], row["dtype"]) == (name, dtype)]
        places = [batches.index(row["batch"]) + width * (number - (len(names) - 1) / 2) for row in own]
        speeds = [row[key] for row in own for key in SPEEDS & row.keys()]
        color = "0.85" if name == FLOOR else f"C{list(dict(names)).index(name)}"
        hatch = "///" if dtype == "bfloat16" else None
        label = f"{name} {dtype or ''}"
        bars = axis.bar(places, speeds, width, label=label, color=color, edgecolor="0.4", hatch=hatch)
        axis.bar_label(bars, fmt="{:,.0f}", fontsize=6, rotation=90, padding=2)
    axis.set_xticks(range(len(batches)), batches)
    axis.set_xlim(-0.5, len(batches) - 0.5)
    axis.margins(y=0.25)  # room for the numbers on top
    axis.set_title(f"{part}: {'words' if part == 'tokenizer' else 'tokens'} per second", loc="left", fontsize=10)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


if __name__ == "__main__":
    run_program(main)
