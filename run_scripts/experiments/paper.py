"""All experiments of the paper from one plan: each is a command in a process of its own, and any may be stopped.

A plan is a JSON file: a list of experiments in the order in which they run.

    {"name": "entities", "program": "reproduce ner", "title": "named entities: WNUT17, F1", "table": "1",
     "files": {"train_file": "ner/train.conll", ...}, "options": {"num_train_epochs": 12, "compare_baseline": true},
     "paper": {"task": "NER, CoNLL-2003", "baseline": 90.15, "elmo": 92.22}}

`files` are relative to the folder of the data. `paper` is the line of the paper to compare with. The program `pretrain`
trains the biLM further. An experiment with `"bilm": NAME` uses the biLM of the experiment NAME, and is compared with
the experiment in `beside`, which uses the biLM as it was. `"folds": 10` is cross-validation: fold N is the test data of
seed N, the next one selects the checkpoint, and the others, of all files together, are trained on. A model that several
experiments need is trained once, and so is a baseline that `--others` have.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch

from modeling_elmo import ELMoConfig

from ..cards.records import RunRecord, RunRecords
from ..fine_tuning.run import different_settings
from ..fine_tuning.tasks import TASKS
from ..program.command_line import given_options, option, option_words, print_conclusion
from ..program.files import JsonObject, read_json, write_lines
from ..program.models import check_model, model_digest
from ..program.processes import sole_run
from .experiment import ABLATIONS, experiment_arms
from .paper_page import SCORES_OF_THE_PAPER, PlanEntries, PlanEntry, page_parts, paper_page, update_page
from .reports import PLAN_OUTPUT, read_records, write_records

PLAN = Path(__file__).with_name("paper_plan.json")
PLAN_PROGRAMS = ("pretrain", "reproduce", "senses", "neighbors", "probe")
PLAN_KEYS = ("name", "program", "title", "table", "files", "options")
OPTIONAL_KEYS = ("paper", "bilm", "beside", "folds")
PAGE = "README.md"  # of the results
LEAST_FOLDS = 3
TRAINED_BILM = "bilm"  # folder of the biLM that an experiment trains; its log is beside it
ARMS_MAY_CHANGE = ("compare_baseline",)  # one arm more or less leaves the others as they are


@dataclass(kw_only=True)
class PaperArguments:
    _argument_group_name = "options of all experiments"

    model_name_or_path: str = option(..., "Folder or Hub name of an ELMo model.")
    data: str = option(..., "Folder with the files of the plan.")
    output_dir: str = option(..., "Folder for the experiments, and for the page with their results.")
    plan: str = option(str(PLAN), "JSON file with the plan. Default: the plan of this package.")
    only: list[str] = option([], "Names of experiments. Default: all of the plan.")
    seeds: int | None = option(None, "Number of seeds. Default: as in the plan.")
    processes: int = option(1, "Number of experiments that run in parallel.")
    use_cpu: bool = option(False, "Use the CPU even if there is an accelerator.")
    dry_run: bool = option(False, "Run nothing; list the finished experiments, and write their page.")
    others: list[str] = option(
        [], "Folders where the plan was run with other biLMs; each is a column of Table 1, under its name."
    )
    page: str | None = option(
        None, "Markdown file to update, such as docs/RESULTS.md: Table 1 replaces the text between two comments."
    )


class PlannedExperiment(NamedTuple):
    """A command of the plan."""

    name: str
    commands: list[list[str]]  # one for each fold
    folder: Path
    arms: list[str]  # of a task
    runs: int  # models of each arm: seeds or folds. A run with more seeds has left more records
    answer: Path | None  # file that a program leaves if it trains no model for a task
    settings: JsonObject  # of `begun_with`

    def is_finished(self) -> bool:
        planned, results = read_records(self.folder)
        if planned is None:
            return False
        if not self.arms:
            return bool(results)
        return self.models_found(results) == self.models

    @property
    def models(self) -> int:
        return len(self.arms) * self.runs

    def models_found(self, records: RunRecords) -> int:
        """How many of the planned models have records."""
        counts = Counter(record["arm"] for record in records)
        return sum(min(counts[arm], self.runs) for arm in self.arms)


def run_plan(arguments: PaperArguments) -> list[RunRecord]:
    """Runs what is missing, and writes the page, even if an experiment fails. Returns the records of all models."""
    check_model(arguments.model_name_or_path)
    plan = read_plan(Path(arguments.plan))
    names = [entry["name"] for entry in plan]
    for name in arguments.only:
        if name not in names:
            raise ValueError(f"--only {name} is not in {arguments.plan}, which has {', '.join(names)}.")
    for folder in arguments.others:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"--others {folder}: folder not found; pass an --output_dir of this program.")
    if arguments.page is not None:
        page_parts(Path(arguments.page))
    output = Path(arguments.output_dir)
    digest = model_digest(arguments.model_name_or_path)
    check_begun(plan, output, digest)
    experiments = []
    for entry in plan:
        if entry["name"] in (arguments.only or names):
            experiments.append(planned(entry, arguments, digest))
    if arguments.dry_run:  # also while another process runs the plan
        print(*map(progress_line, experiments), sep="\n")
        write_page(plan, arguments)
    else:
        with sole_run(output):
            run_missing(plan, experiments, arguments)
    finished = [experiment.name for experiment in experiments if experiment.is_finished()]
    command = ["elmo", "reproduce", "all", *given_options(arguments, but=["dry_run"])]
    if len(finished) == len(experiments):
        command = ["elmo", "reproduce", "all", "--model_name_or_path", "OTHER_MODEL", "--data", arguments.data]
        command += ["--output_dir", "OTHER_FOLDER", "--others", arguments.output_dir]
    print_conclusion(
        f"{len(finished):,} of {len(experiments):,} experiments are finished; {output / PAGE} compares them with the "
        "paper's.",
        *command,
    )
    all_records = []
    for experiment in experiments:
        if experiment.arms:
            _, records = read_records(experiment.folder)
            all_records += records
    return all_records


def run_missing(plan: PlanEntries, experiments: Sequence[PlannedExperiment], arguments: PaperArguments):
    missing = [experiment for experiment in experiments if not experiment.is_finished()]
    needed = {experiment.settings["bilm"] for experiment in missing}
    for experiment in experiments:
        # A record without its model, from another disk: the model is needed again.
        has_model = (experiment.folder / TRAINED_BILM / "config.json").is_file()
        if experiment.name in needed and experiment not in missing and not has_model:
            missing.append(experiment)
    finished = len(experiments) - len(missing)
    print(f"{len(experiments)} experiments, {finished} of them finished before")
    threads = max(1, torch.get_num_threads() // arguments.processes)
    trainings = [experiment for experiment in missing if experiment.settings["program"] == "pretrain"]
    others = [experiment for experiment in missing if experiment not in trainings]
    failed = []
    try:
        for wave in (trainings, others):  # others may take a biLM that one of the first has trained
            with ThreadPoolExecutor(arguments.processes) as pool:  # Ctrl-C reaches the commands, too; no other begins
                statuses = pool.map(partial(run_command, threads=threads), wave)
                failed += compress(wave, statuses)
    finally:
        write_page(plan, arguments)
    if failed:
        lines = [f"{len(failed)} experiments have failed. The same command repeats them."]
        for experiment in failed:
            lines.append(f"{experiment.name}: {last_line(experiment)} (see {experiment.folder / PLAN_OUTPUT})")
        raise ChildProcessError("\n".join(lines))


def begun_with(entry: PlanEntry, digest: str) -> JsonObject:
    """What the results of an experiment depend on. `digest` is the digest of the model."""
    settings = {"program": entry["program"], "bilm": entry.get("bilm"), "model_digest": digest}
    if "folds" in entry:
        settings["folds"] = entry["folds"]
    settings |= entry["files"] | entry["options"]
    settings.pop("seeds", None)
    return settings


def check_begun(plan: PlanEntries, output: Path, digest: str):
    """Raises an error if an experiment in the folder was started with another model or plan: a page has one of each."""
    for entry in plan:
        folder = output / entry["name"]
        begun, _ = read_records(folder)
        if not begun:
            continue
        changes = different_settings(begun, begun_with(entry, digest), ARMS_MAY_CHANGE)
        if changes:
            raise FileExistsError(
                f"{folder} was started with other settings: {changes}. Pass another --output_dir, or delete the folder."
            )


def write_page(plan: PlanEntries, arguments: PaperArguments):
    output = Path(arguments.output_dir)
    path = output / PAGE
    others = list(map(Path, arguments.others))
    page = paper_page(plan, output, others)
    write_lines(path, [page])
    if arguments.page is not None:
        update_page(Path(arguments.page), page)


def read_plan(path: Path) -> PlanEntries:
    plan = read_json(path)
    if not isinstance(plan, list) or not plan:
        raise ValueError(f"{path} is not a plan; it must hold a list of experiments.")
    for number, entry in enumerate(plan, 1):
        keys = entry if isinstance(entry, dict) else {}
        missing = [key for key in PLAN_KEYS if key not in keys]
        if missing:
            raise ValueError(f"{path}, experiment {number} lacks {', '.join(missing)}.")
        wrong = [key for key in entry if key not in PLAN_KEYS + OPTIONAL_KEYS]
        if wrong:
            raise ValueError(
                f"{path}, experiment {entry['name']}: {', '.join(wrong)} is not one of "
                f"{', '.join(PLAN_KEYS + OPTIONAL_KEYS)}."
            )
    names = [entry["name"] for entry in plan]
    bilms = [entry["name"] for entry in plan if entry["program"] == "pretrain"]
    for entry in plan:
        name = entry["name"]
        place = f"{path}, experiment {name}"
        if not (isinstance(entry["files"], dict) and isinstance(entry["options"], dict)):
            raise ValueError(f"{place}: files and options must be objects, with a key for each option.")
        if names.count(name) > 1:
            raise ValueError(f"{place} is in the plan twice; give each its own name.")
        check_values(entry, place)
        bilm = entry.get("bilm")
        if bilm is not None and bilm not in bilms:
            raise ValueError(f"{place}: bilm {bilm!r} is not an experiment with the program 'pretrain'.")
        beside = entry.get("beside")
        if beside is not None and beside not in names:
            raise ValueError(f"{place}: beside {beside!r} is not an experiment of the plan.")
    return plan


def check_values(entry: PlanEntry, place: str):
    """Refuses a program, a task, an ablation or a number of folds that no program knows."""
    program, *words = str(entry["program"]).split() or [""]
    if program not in PLAN_PROGRAMS:
        raise ValueError(f"{place}: program {program!r} is not one of {', '.join(PLAN_PROGRAMS)}.")
    if program == "reproduce" and words not in ([task] for task in TASKS):
        raise ValueError(f"{place}: program {entry['program']!r} must be reproduce and one of {', '.join(TASKS)}.")
    ablation = entry["options"].get("ablation")
    if ablation not in (None, *ABLATIONS, "each_layer"):
        raise ValueError(f"{place}: ablation {ablation!r} is not one of {', '.join(ABLATIONS)}, each_layer.")
    seeds = entry["options"].get("seeds", 1)
    if not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"{place}: seeds is {seeds!r}; pass a number above 0.")
    folds = entry.get("folds", LEAST_FOLDS)
    if not isinstance(folds, int) or folds < LEAST_FOLDS:
        raise ValueError(f"{place}: folds is {folds!r}; pass {LEAST_FOLDS} or more, for training, validation and test.")
    check_table(entry, program, place)


def check_table(entry: PlanEntry, program: str, place: str):
    """Refuses a table that has no place for the results, and a line of the paper that lacks its scores."""
    table = str(entry["table"])
    scores = SCORES_OF_THE_PAPER.get((table, program))
    if scores is None or table != entry["table"]:
        tables = [f"{name!r} ({of_table})" for name, of_table in SCORES_OF_THE_PAPER]
        raise ValueError(f"{place}: table {entry['table']!r} of {program} is not one of {', '.join(tables)}.")
    if table == "domain" and program == "reproduce" and not {"bilm", "beside"} <= entry.keys():
        raise ValueError(f"{place}: table 'domain' compares a task with another; pass bilm and beside.")
    if "paper" not in entry:
        return
    given = entry["paper"] if isinstance(entry["paper"], dict) else {}
    missing = [key for key in ("task", *scores) if key not in given]
    if missing:
        raise ValueError(f"{place}: paper lacks {', '.join(missing)}.")


def planned(entry: PlanEntry, arguments: PaperArguments, digest: str) -> PlannedExperiment:
    """The commands of an entry. `digest` is the digest of the model."""
    program, *words = entry["program"].split()
    name = entry["name"]
    output = Path(arguments.output_dir)
    folder = output / name
    options = entry["options"].copy()
    answer = None
    arms = []
    seeds = arguments.seeds or options.get("seeds", 1)
    files = planned_files(entry, Path(arguments.data))
    model = output / entry["bilm"] / TRAINED_BILM if "bilm" in entry else arguments.model_name_or_path
    device: JsonObject = {"use_cpu": True}
    if program == "pretrain":
        trained = folder / TRAINED_BILM
        answer = trained / "results" / "pretraining.json"
        options |= {"model_name_or_path": model, "output_dir": trained}
        if any(trained.glob("checkpoint-*")):
            options["resume_from_checkpoint"] = "last"
    elif program == "reproduce":
        arms = experiment_arms(
            options.get("ablation"),
            options.get("compare_baseline", False),
            options.get("use_elmo", True),
            ELMoConfig.from_pretrained(arguments.model_name_or_path).num_hidden_layers,
        )
        options |= {"model_name_or_path": model, "output_dir": folder, "seeds": seeds}
        options["reuse_from"] = [output, *arguments.others]
    else:
        answer = folder / "results" / f"{program}.json"
        options |= {"model": model, "output": answer}
        device = {"device": "cpu"}
    if arguments.use_cpu:
        options |= device
    words += map(str, files.pop("text", []))
    command = [sys.executable, "-m", "modeling_elmo.run_scripts.modeling_elmo_cli", program, *words]
    runs = entry.get("folds", seeds)
    changes: list[JsonObject] = [{}]
    if "folds" in entry:
        changes = [fold_options(fold, runs) for fold in range(runs)]
    commands = []
    for change in changes:
        commands.append([*command, *option_words(files | options | change)])
    arm_names = [arm.name for arm in arms]
    return PlannedExperiment(name, commands, folder, arm_names, runs, answer, begun_with(entry, digest))


def planned_files(entry: PlanEntry, data: Path) -> dict[str, list[Path]]:
    """The files of an experiment by option, which must exist."""
    files = {}
    for option_name, value in entry["files"].items():
        names = value if isinstance(value, list) else [value]
        paths = [data / name for name in names]
        files[option_name] = paths
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path}, of the experiment {entry['name']}, does not exist. Put it there, or leave the experiment "
                    "out with --only."
                )
    return files


def fold_options(fold: int, folds: int) -> JsonObject:
    """The options of cross-validation for one fold; the data of a fold are its part of each file."""

    parts = []
    for number in range(folds):
        start = 100 * number // folds
        end = 100 * (number + 1) // folds
        parts.append("+".join(f"{split}[{start}%:{end}%]" for split in ("train", "validation", "test")))
    test, validation, *train = parts[fold:] + parts[:fold]
    splits = {"train_split": "+".join(train), "validation_split": validation, "test_split": test}
    return {**splits, "seed": fold, "seeds": 1}


def run_command(experiment: PlannedExperiment, threads: int) -> int:
    """The exit status of the commands, whose output goes to a file in the folder."""
    folder = experiment.folder
    _, records = read_records(folder)
    write_records(folder, experiment.settings, records)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    status = 0
    with (folder / PLAN_OUTPUT).open("ab") as log:
        for words in experiment.commands:
            status = subprocess.run(words, stdout=log, stderr=log, env=environment).returncode
            if status:
                break
    if status == 0 and experiment.answer:
        write_records(folder, experiment.settings, [read_json(experiment.answer)])
    print(progress_line(experiment), flush=True)
    return status


def progress_line(experiment: PlannedExperiment) -> str:
    """How much of an experiment is finished, and how long a model of it takes."""
    _, records = read_records(experiment.folder)
    finished = experiment.is_finished()
    line = f"{experiment.name}: {'finished' if finished else 'not finished'}"
    if experiment.arms and finished:
        line += f", models: {len(records)}"
    elif experiment.arms:
        line += f", models: {experiment.models_found(records)} of {experiment.models}"
    minutes = [record["seconds"] / 60 for record in records if "seconds" in record]
    if minutes:
        line += f", {sum(minutes) / len(minutes):.1f} minutes for each"
    return line


def last_line(experiment: PlannedExperiment) -> str:
    output = (experiment.folder / PLAN_OUTPUT).read_text(encoding="utf-8", errors="replace").rstrip()
    *_, line = re.split(r"[\r\n]", output)
    return line.strip() or "no output"
