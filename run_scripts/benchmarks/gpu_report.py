"""`make bench-gpu`: is this package right on this card, and how fast is it?

    python -m modeling_elmo.run_scripts.benchmarks.gpu_report --output build/gpu.json
    python -m modeling_elmo.run_scripts.benchmarks.gpu_report --parts layers inference --against ../clone

The parts are the tests for a card, layers of the LSTM, pretraining, and inference. Each case runs in a process of its
own, smallest first. A case that does not answer is killed, and named in its table. The tables are in Markdown, and the
JSON file has all times. No time is printed for a result that is wrong.

It needs a CUDA device. `--device cpu` runs the same cases at tiny sizes, to test this program.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from modeling_elmo.directions import LAYERS_KERNELS
from modeling_elmo.kernels.plan import BACKENDS

from ..program.command_line import ProgramParser, option, run
from ..program.files import check_output, write_json
from .children import Children, end, run_side_by_side
from .device_timing import quartiles
from .gpu_cases import ALLENNLP, OTHER, OURS
from .layer_speed import CUDNN, DEFINITION, PASSES, SHAPE, STEPS_BY_LAUNCHES

CLONE = Path(__file__).resolve().parents[2]
GPU_PARTS = ("tests", "layers", "pretraining", "inference")
TRIALS = tuple(name for name in BACKENDS if name not in ("reference", "int8"))  # kernels that must be asked for
TESTS_AT_ONCE = 3
SECONDS_TO_COMPILE = 80  # in all; a kernel that is not ready is compiled by the process that measures it
AHEAD = 3  # processes that import torch while another one measures
Case = dict[str, Any]
GPURow = dict[str, Any]


@dataclass(kw_only=True)
class GPUReportArguments:
    parts: list[str] = option(
        [*GPU_PARTS], f"Parts of the report: {', '.join(GPU_PARTS)}.", choices=GPU_PARTS, metavar="PART"
    )
    device: str = option("cuda", "Device: cuda, or cpu for a trial of this program at tiny sizes.")
    seconds: float = option(225.0, "Time after which no further case begins.")
    against: str | None = option(None, "Folder of another clone, to compare in inference.")
    output: str = option("build/gpu.json", "JSON file for all figures; the tables are next to it, in a file *.md.")

    def __post_init__(self):
        if self.against and not Path(self.against, "modeling_elmo", "__init__.py").is_file():
            raise FileNotFoundError(f"--against {self.against} is not the folder of a clone of this repository.")


@dataclass(frozen=True)
class Sizes:
    """What is measured on a device."""

    layers: tuple[tuple[int, int, int, int], ...]  # cells, projection, sequences, steps
    tokens: tuple[int, ...]  # of a batch in pretraining
    batches: tuple[str, ...]  # in inference
    preset: str  # in inference
    pretraining: dict[str, Any]
    product: int  # size of the matrices of the largest product


SIZES_OF_CASES = {
    # Smallest first. 372x44 is the shape of a training batch. The larger size is the original's.
    "cuda": Sizes(
        layers=(
            *((1024, 256, 32, 32), (1024, 256, 128, 32), (1024, 256, 372, 44), (1024, 256, 512, 32)),
            *((4096, 512, 32, 32), (4096, 512, 128, 32), (1024, 256, 2048, 24), (4096, 512, 512, 32)),
            (4096, 512, 1024, 24),
        ),
        tokens=(4096, 16_384, 65_536),
        batches=("1x20", "32x30", "128x30", "1024x30"),
        preset="original",
        # The size of elmo-small-en.
        pretraining={
            **{"preset": "small", "config": {"projection_size": 256}, "vocabulary_size": 50_000},
            **{"words": 600_000, "steps": 15, "workers": 4},
        },
        product=8192,
    ),
    "cpu": Sizes(
        layers=((12, 4, 5, 3),),
        tokens=(256,),
        batches=("1x8", "4x6"),
        preset="tiny",
        pretraining={
            **{"preset": "tiny", "config": {}, "vocabulary_size": 2000},
            **{"words": 10_000, "steps": 5, "workers": 0},
        },
        product=64,
    ),
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parsed = ProgramParser(GPUReportArguments, description=__doc__).parse(arguments)
    if is_card(parsed) and not torch.cuda.is_available():
        raise ValueError(
            f"--device {parsed.device}: torch {torch.__version__} finds no CUDA device; this report needs one."
        )
    output = Path(parsed.output)
    check_output(parsed.output)
    check_output(str(output.with_suffix(".md")))
    deadline = time.monotonic() + parsed.seconds
    command = [sys.executable, "-m", f"{__package__}.gpu_cases", parsed.device]
    rows: list[GPURow] = []
    with Children(command, AHEAD if is_card(parsed) else 1) as children, ThreadPoolExecutor(1) as thread:
        conditions = header(children, parsed)
        to_measure = list(cases(parsed, conditions))
        compiled = thread.submit(run_side_by_side, command, compilations(to_measure), SECONDS_TO_COMPILE, cores())
        if "tests" in parsed.parts:
            rows += rows_of_tests(parsed, deadline)
        tell(deadline, "kernels are compiled")
        compiled.result()
        for case in to_measure:
            tell(deadline, title_of_case(case))
            rows += measured_rows(children, case, deadline)
            write_json(output, {"conditions": conditions, "rows": rows})  # an interrupted report keeps its figures
    tables = whole_report(conditions, rows)
    print(tables)
    write_json(output, {"conditions": conditions, "rows": rows})
    output.with_suffix(".md").write_text(tables, encoding="utf-8")
    return {"conditions": conditions, "rows": rows}


def compilations(to_measure: list[Case]) -> list[Case]:
    """Of kernels that take seconds to compile, so that many processes do it at once, during the tests."""
    kernels = []
    for case in to_measure:
        if {*case.get("implementations", ())} & {*kernels_in_one_launch()} and case["part"] == "layers":
            kernels.append({**case, "part": "compilation"})
    return kernels


def kernels_in_one_launch() -> list[str]:
    return [name for name in LAYERS_KERNELS if name != STEPS_BY_LAUNCHES]


def cores() -> int:
    """Of which two are left to the tests."""
    return max(1, (os.cpu_count() or 1) - 2)


def tell(deadline: float, what: str):
    print(f"{max(0, deadline - time.monotonic()):4.0f} s left: {what}", file=sys.stderr, flush=True)


def header(children: Children, parsed: GPUReportArguments) -> dict[str, Any]:
    answer = children.run({"part": "facts", "size": sizes_of(parsed).product}, seconds=60)
    if not answer.rows:
        raise RuntimeError(f"The device does not compute: {answer.failure}.")
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {**answer.rows[0], "date": date, "commit": commit_of(CLONE), "against": commit_of(parsed.against)}


def is_card(parsed: GPUReportArguments) -> bool:
    return parsed.device != "cpu"


def sizes_of(parsed: GPUReportArguments) -> Sizes:
    return SIZES_OF_CASES["cuda" if is_card(parsed) else "cpu"]


def commit_of(folder: Path | str | None) -> str | None:
    """The commit of a clone, and whether it was changed; `unknown` outside of one."""
    if folder is None:
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8")
    except FileNotFoundError:  # git is not installed
        return "unknown"
    return answer.stdout.strip() or "unknown"


def cases(parsed: GPUReportArguments, conditions: dict[str, Any]) -> Iterator[Case]:
    """Kernels that must be asked for, and other packages, have processes of their own."""
    sizes = sizes_of(parsed)
    trials = TRIALS if is_card(parsed) else ()
    kernels = kernels_in_one_launch() if is_card(parsed) else []
    if "layers" in parsed.parts:
        for shape in sizes.layers:
            case = {"part": "layers", **dict(zip(SHAPE, shape, strict=True))}
            yield {**case, "implementations": [STEPS_BY_LAUNCHES, DEFINITION, CUDNN], "seconds": 40}
            for kernel in kernels:
                yield {**case, "implementations": [kernel], "seconds": 25}
    if "pretraining" in parsed.parts:
        case = {"part": "pretraining", **sizes.pretraining, "seconds": 60}
        for tokens in sizes.tokens:
            for cuda_graph in (False, True) if is_card(parsed) else (False,):
                yield {**case, "tokens": tokens, "backend": None, "cuda_graph": cuda_graph}
        for backend in trials:
            middle = sizes.tokens[len(sizes.tokens) // 2]
            yield {**case, "tokens": middle, "backend": backend, "cuda_graph": True}
    if "inference" in parsed.parts:
        case = {"part": "inference", "preset": sizes.preset, "batches": sizes.batches, "seconds": 60}
        yield {**case, "implementations": [OURS, DEFINITION, CUDNN]}
        others = [f"{OURS}, {name}" for name in trials]
        if conditions["allennlp"]:
            others.append(ALLENNLP)
        if parsed.against:
            others.append(OTHER)
        for name in others:
            yield {**case, "implementations": [name], "against": parsed.against}


def title_of_case(case: Case) -> str:
    names = [str(case[name]) for name in (*SHAPE, "tokens") if name in case]
    which = case.get("implementations", [case.get("backend") or OURS])
    if case.get("cuda_graph"):
        which = [*which, "CUDA graph"]
    return " ".join([case["part"], "/".join(names), ", ".join(which)])


def measured_rows(children: Children, case: Case, deadline: float) -> list[GPURow]:
    """The rows of a case with its conditions and, if it failed or did not begin, a row that says so."""
    left = deadline - time.monotonic()
    if left <= 0:
        return [{**case, "failure": "not measured: out of time"}]
    answer = children.run(case, case["seconds"])
    rows = [{**case, **row} for row in answer.rows]
    if answer.failure:
        rows.append({**case, "failure": answer.failure})
    return rows


def card_tests() -> dict[str, tuple[list[str], dict[str, str], float]]:
    """The tests for a card: arguments of pytest, variables and seconds by name."""
    folder = CLONE / "tests"
    marked = [str(path) for path in sorted(folder.glob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    kernels = [str(folder / name) for name in ("test_lstm_cuda.py", "test_softmax_cuda.py")]
    return {
        "marked `gpu`": (["-m", "gpu", *marked], {}, 30),
        "kernels in triton": (["-m", "slow or not slow", "-k", "not compile", *kernels], {}, 40),
        "every model compared with the CPU": (
            ["-m", "slow", str(folder / "test_devices.py")],
            {"ELMO_TEST_DEVICE": "cuda"},
            80,
        ),
    }


def rows_of_tests(parsed: GPUReportArguments, deadline: float) -> Iterator[GPURow]:
    """The last line of each run of pytest, and the tests that failed."""
    for name, (arguments, variables, seconds) in card_tests().items():
        if time.monotonic() > deadline:
            yield {"part": "tests", "tests": name, "failure": "not run: out of time"}
            continue
        tell(deadline, f"tests {name}")
        yield {"part": "tests", "tests": name, **result_of_pytest(arguments, variables, seconds)}


def result_of_pytest(arguments: Sequence[str], variables: dict[str, str], seconds: float) -> GPURow:
    at_once = ["-n", str(TESTS_AT_ONCE)] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *at_once, *arguments]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    process = subprocess.Popen(command, cwd=CLONE, env={**os.environ, **variables}, start_new_session=True, **options)
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end(process)
        process.communicate()
        return {"failure": f"not finished within {seconds:.0f} s"}
    lines = printed.strip().splitlines() or ["pytest printed nothing"]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    return {"status": process.returncode, "summary": lines[-1].strip("= "), "failed": failed}


def whole_report(conditions: dict[str, Any], rows: list[GPURow]) -> str:
    """The whole page in Markdown."""
    tables = {
        "tests": table_of_tests,
        "layers": table_of_layers,
        "pretraining": table_of_pretraining,
        "inference": table_of_inference,
    }
    blocks = [heading(conditions)]
    for part, table in tables.items():
        chosen = [row for row in rows if row["part"] == part]
        if chosen:
            blocks.append(f"## {part.capitalize()}\n\n{table(chosen, conditions)}")
    return "\n\n".join(blocks) + "\n"


def heading(conditions: dict[str, Any]) -> str:
    card = conditions.get("name", conditions["device"])
    facts = [f"torch {conditions['torch']}", f"commit {conditions['commit']}", conditions["date"]]
    if "capability" in conditions:
        memory = f"{conditions['memory'] / 2**30:.0f} GiB, compute capability {conditions['capability']}"
        facts = [memory, f"driver {conditions['driver']}", f"triton {conditions['triton'] or 'missing'}", *facts]
    if conditions["against"]:
        facts.append(f"other checkout {conditions['against']}")
    if not conditions["allennlp"]:
        facts.append("AllenNLP cannot be imported")
    peaks = [f"{value / 1e12:,.1f} in {name}" for name, value in conditions["peaks"].items()]
    products = f"A large product of matrices reaches {', '.join(peaks)} TFLOP/s."
    return f"# {card}\n\n{'; '.join(facts)}.\n\n{products} Times are medians, with quartiles in brackets."


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    table = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def table_of_tests(rows: list[GPURow], conditions: dict[str, Any]) -> str:
    lines, failed = [], []
    for row in rows:
        lines.append([row["tests"], row.get("summary") or row["failure"]])
        failed += row.get("failed", [])
    table = markdown(["tests", "result"], lines)
    return "\n".join([table, "", *(f"- failed: `{name}`" for name in failed)]).strip()


def equal_cell(row: GPURow) -> str:
    """Whether a result is right, and how many times the error of the definition it has."""
    if "equal" not in row:
        return "-"
    ratio = row["error_ratio"]
    text = ratio if isinstance(ratio, str) else f"{ratio:.2g}"
    return f"{'yes' if row['equal'] else 'NO'}, {text}"


def time_cell(milliseconds: list[float] | None) -> str:
    if milliseconds is None:
        return "-"
    first, middle, third = quartiles(milliseconds)
    return f"{middle:.3g} ({first:.3g} to {third:.3g})"


def speedup(row: GPURow | None, other: GPURow | None) -> float | None:
    """How many times as fast a row is as another."""
    if row is None or other is None or "milliseconds" not in row or "milliseconds" not in other:
        return None
    return quartiles(other["milliseconds"])[1] / quartiles(row["milliseconds"])[1]


def table_of_layers(rows: list[GPURow], conditions: dict[str, Any]) -> str:
    """A line for each size, precision and implementation, and below it what is slower than `torch.nn.LSTM`."""
    shapes = dict.fromkeys(shape_of_row(row) for row in rows)
    lines, slower = [], []
    for shape in shapes:
        mine = [row for row in rows if shape_of_row(row) == shape]
        cells, projection, sequences, steps = shape
        where = [f"{cells}/{projection}", f"{sequences}x{steps}"]
        for precision in dict.fromkeys(row["precision"] for row in mine if "precision" in row):
            found = {(row["implementation"], row["pass"]): row for row in mine if row.get("precision") == precision}
            for name in dict.fromkeys(implementation for implementation, _ in found):
                passes = [found.get((name, kind)) for kind in PASSES]
                ratios = [speedup(row, found.get((CUDNN, kind))) for row, kind in zip(passes, PASSES, strict=True)]
                lines.append([*where, precision, name, *cells_of_passes(passes), ratio_cell(ratios)])
                if name not in (DEFINITION, CUDNN):
                    slower += losses([*where, precision, name], ratios)
        lines += failure_lines([row for row in mine if "precision" not in row], where)
    columns = ["cells/projection", "sequences x steps", "precision", "implementation", "equal"]
    columns += [f"{kind}, ms" for kind in PASSES] + ["times as fast as torch.nn.LSTM"]
    return "\n".join([markdown(columns, lines), "", slower_than_torch(slower)])


def shape_of_row(row: GPURow) -> tuple[int, ...]:
    return tuple(row[name] for name in SHAPE)


def cells_of_passes(passes: list[GPURow | None]) -> list[str]:
    """The worse of the checks, and the times or the failure of each pass."""
    there = [row for row in passes if row is not None]
    checked = sorted((row for row in there if "equal" in row), key=lambda row: row["equal"])
    times = [row.get("failure") or time_cell(row.get("milliseconds")) if row else "-" for row in passes]
    return [equal_cell(checked[0]) if checked else "-", *times]


def ratio_cell(ratios: list[float | None]) -> str:
    return " / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)


def losses(where: list[str], ratios: list[float | None]) -> list[str]:
    found = []
    for kind, ratio in zip(PASSES, ratios, strict=True):
        if ratio is not None and ratio < 1:
            found.append(f"- {', '.join([*where, kind])}: {ratio:.2f} times as fast")
    return found


def slower_than_torch(lines: list[str]) -> str:
    if not lines:
        return "No measured kernel of this package is slower than `torch.nn.LSTM`."
    return "\n".join(["Slower than `torch.nn.LSTM`:", "", *lines])


def failure_lines(rows: list[GPURow], where: list[str]) -> list[list[str]]:
    """Of cases that gave no rows, or not all."""
    return [[*where, "-", ", ".join(row["implementations"]), "-", row["failure"], "-", "-"] for row in rows]


def table_of_pretraining(rows: list[GPURow], conditions: dict[str, Any]) -> str:
    peak = conditions["peaks"]["bfloat16"]
    lines = []
    for row in rows:
        name = f"{OURS}, {row['backend']}" if row["backend"] else OURS
        if row["cuda_graph"]:
            name += ", CUDA graph"
        if "failure" in row:
            lines.append([f"{row['tokens']:,}", name, row["failure"], *"-----"])
            continue
        first, middle, third = quartiles(row["words_per_second"])
        operations = middle * row["operations_per_word"]
        busy = row["busy_seconds_per_step"]
        share = "-" if busy is None else f"{busy * middle / row['words_per_step']:.0%}"
        words = f"{middle:,.0f} ({first:,.0f} to {third:,.0f})"
        figures = [words, f"{operations / 1e12:.3g}", f"{operations / peak:.1%}", share, f"{row['data_wait']:.1%}"]
        figures.append(f"{row['loss']:.3f}")
        lines.append([f"{row['tokens']:,}", name, *figures])
    columns = ["tokens of a batch", "implementation", "words/s", "TFLOP/s", "of the large product (MFU)"]
    return markdown([*columns, "device computes", "waiting for batches", "last loss"], lines)


def table_of_inference(rows: list[GPURow], conditions: dict[str, Any]) -> str:
    """A line for each batch, precision and implementation, and how many times as fast the first one is."""
    lines = []
    for batch in dict.fromkeys(row["batch"] for row in rows if "batch" in row):
        of_batch = [row for row in rows if row.get("batch") == batch]
        for precision in dict.fromkeys(row["precision"] for row in of_batch):
            found = {row["implementation"]: row for row in of_batch if row["precision"] == precision}
            for name, row in found.items():
                ratio = speedup(found.get(OURS), row)
                middle = quartiles(row["milliseconds"])[1] if "milliseconds" in row else None
                speed = "-" if middle is None else f"{1e3 * row['tokens'] / middle:,.0f}"
                time_or_failure = row.get("failure") or time_cell(row.get("milliseconds"))
                where = [batch, f"{row['tokens']:,}", precision, name, equal_cell(row)]
                lines.append([*where, time_or_failure, speed, "-" if ratio is None else f"{ratio:.2f}"])
    for row in rows:
        if "batch" not in row:
            lines.append(["-", "-", "-", ", ".join(row["implementations"]), "-", row["failure"], "-", "-"])
    columns = ["batch", "tokens", "precision", "implementation", "equal", "ms", "tokens/s"]
    return markdown([*columns, f"time / that of {OURS}"], lines)


if __name__ == "__main__":
    run(main)
