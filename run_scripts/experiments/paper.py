"""All experiments of the paper from one plan: each is a command in a process of its own, and any may be stopped.

A plan is a JSON file: a list of experiments in the order in which they run.

    {"name": "entities", "program": "reproduce ner", "title": "named entities: WNUT17, F1", "table": "1",
     "files": {"train_file": "ner/train.conll", ...}, "options": {"num_train_epochs": 12, "compare_baseline": true},
     "paper": {"task": "NER, CoNLL-2003", "baseline": 90.15, "elmo": 92.22}}

`files` are relative to the folder of the data. `paper` is the line of the paper beside which the result stands. The
program `pretrain` trains the biLM further. An experiment with `"bilm": NAME` takes the biLM of the experiment NAME, and
stands beside the experiment in `beside`, which takes the biLM as it was. A model of a task that several experiments
need is trained once.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from modeling_elmo import ELMoConfig
from modeling_elmo.run_scripts.cards.tables import read_record
from modeling_elmo.run_scripts.experiments.arms import experiment_arms
from modeling_elmo.run_scripts.experiments.experiment import PLAN_OUTPUT, PLAN_SETTINGS
from modeling_elmo.run_scripts.experiments.paper_page import (
    PlanEntry,
    paper_page,
    results_of,
    trained_bilm,
    update_page,
)
from modeling_elmo.run_scripts.experiments.reports import model_digest
from modeling_elmo.run_scripts.program.files import (
    check_model,
    different_settings,
    files_named,
    read_json,
    write_json,
    write_lines,
)
from modeling_elmo.run_scripts.program.processes import sole_run

PLAN = Path(__file__).with_name("paper_plan.json")
MODULES = {
    "pretrain": "run_pretraining",
    "reproduce": "reproduce",
    "senses": "word_senses",
    "neighbors": "nearest_neighbors",
    "probe": "probe",
}
PLAN_KEYS = ("name", "program", "title", "table", "files", "options")
ARMS_MAY_CHANGE = ("compare_baseline",)  # one arm more or less leaves the others as they are
SECONDS_BETWEEN_LOOKS = 2.0


@dataclass(kw_only=True)
class PaperArguments:
    _argument_group_name = "options of all experiments"

    model_name_or_path: str = field(metadata={"help": "Folder or Hub name of an ELMo model."})
    data: str = field(metadata={"help": "Folder with the files of the plan."})
    output_dir: str = field(metadata={"help": "Folder for the experiments, and for the page with their results."})
    plan: str = field(default=str(PLAN), metadata={"help": "Plan, a JSON file. Default: the one that we ship."})
    only: list[str] | None = field(default=None, metadata={"help": "Names of experiments. Default: all of the plan."})
    seeds: int | None = field(default=None, metadata={"help": "Number of seeds. Default: as in the plan."})
    processes: int = field(default=1, metadata={"help": "Number of experiments that run side by side."})
    use_cpu: bool = field(default=False, metadata={"help": "Use the CPU even if there is an accelerator."})
    dry_run: bool = field(
        default=False, metadata={"help": "Run nothing: list what is finished, and write the page of that."}
    )
    others: list[str] | None = field(
        default=None,
        metadata={
            "help": "Folders of the same plan with other biLMs, which get columns in Table 1, named as they are."
        },
    )
    page: str | None = field(
        default=None,
        metadata={"help": "Markdown file that has the page between two marks, such as docs/RESULTS.md; it is updated."},
    )


@dataclass(frozen=True)
class PlannedExperiment:
    """A command of the plan.

    Args:
        members: the number of models that it trains for a task: its arms, with each seed.
        settings: what its results depend on, as `begun_with` returns it.
    """

    name: str
    command: list[str]
    folder: Path
    members: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_pretraining(self) -> bool:
        return self.settings.get("program") == "pretrain"

    def records(self) -> list[dict[str, Any]]:
        """The records of the members that are finished. A single member has the folder for itself.

        There may be more of them than `members`: those of a run with more seeds.
        """
        paths = files_named("record.json", self.folder)
        in_folders = [path for path in paths if path.parent != self.folder]
        return [read_record(path) for path in in_folders or (paths if self.members == 1 else [])]

    def is_finished(self) -> bool:
        results = results_of(self.folder) if (self.folder / PLAN_SETTINGS).is_file() else None
        return results is not None and (not self.members or len(results) >= self.members)


def run_plan(arguments: PaperArguments) -> list[dict[str, Any]]:
    """Runs what is missing, and writes the page, also after an experiment has failed or was interrupted.

    Returns:
        The records of all models.

    Raises:
        ChildProcessError: an experiment has failed; the others have run.
    """
    check_model(arguments.model_name_or_path)
    plan = read_plan(Path(arguments.plan))
    names = [entry["name"] for entry in plan]
    if unknown := [name for name in arguments.only or [] if name not in names]:
        raise ValueError(f"--only {unknown[0]} is not in {arguments.plan}, which has {', '.join(names)}.")
    if absent := [folder for folder in arguments.others or [] if not Path(folder).is_dir()]:
        raise FileNotFoundError(
            f"--others {absent[0]}: there is no such folder; pass the --output_dir of another plan."
        )
    output = Path(arguments.output_dir)
    digest = model_digest(arguments.model_name_or_path)
    check_begun(plan, output, digest)
    chosen = [entry for entry in plan if arguments.only is None or entry["name"] in arguments.only]
    experiments = [planned(entry, arguments, digest) for entry in chosen]
    if arguments.dry_run:  # also while another process runs the plan
        print(*map(progress_line, experiments), sep="\n")
        write_page(plan, arguments)
    else:
        with sole_run(output):
            run_missing(plan, experiments, arguments)
    return [record for each in experiments for record in each.records()]


def run_missing(plan: Sequence[PlanEntry], experiments: Sequence[PlannedExperiment], arguments: PaperArguments):
    missing, failed = [each for each in experiments if not each.is_finished()], []
    needed: set[str] = {bilm for each in missing if (bilm := each.settings.get("bilm"))}
    for name in sorted(needed - {each.name for each in experiments}):
        if not (trained_bilm(Path(arguments.output_dir, name)) / "config.json").is_file():
            raise ValueError(
                f"--only leaves out {name}, whose biLM others need, and {arguments.output_dir} has no model of it. Add "
                f"{name} to --only."
            )
    for each in experiments:
        bilm = trained_bilm(each.folder)
        if each.name in needed and each not in missing and not (bilm / "config.json").is_file():
            shutil.rmtree(bilm)  # a record without its model, from another disk: the model is needed again
            missing.append(each)
    print(f"{len(experiments)} experiments, {len(experiments) - len(missing)} of them finished before")
    try:
        for are_first in (True, False):  # others may take a biLM that one of the first has trained
            wave = [each for each in missing if each.is_pretraining is are_first]
            failed += run_side_by_side(wave, arguments.processes)
    finally:
        write_page(plan, arguments)
    if failed:
        reasons = "\n".join(f"{each.name}: {last_line(each)} (see {each.folder / PLAN_OUTPUT})" for each in failed)
        raise ChildProcessError(f"{len(failed)} experiments have failed. The same command repeats them.\n{reasons}")


def begun_with(entry: PlanEntry, digest: str) -> dict[str, Any]:
    """What the results of an experiment depend on. `digest` is that of the model."""
    options = {name: value for name, value in entry["options"].items() if name != "seeds"}
    kept = {"program": entry["program"], "bilm": entry.get("bilm"), "model_digest": digest}
    return kept | entry["files"] | options


def check_begun(plan: Sequence[PlanEntry], output: Path, digest: str):
    """Raises an error if an experiment in the folder was begun with another model or plan: a page has one of each."""
    for entry in plan:
        path = output / entry["name"] / PLAN_SETTINGS
        if path.is_file() and (changes := different_settings(path, begun_with(entry, digest), ARMS_MAY_CHANGE)):
            raise FileExistsError(
                f"{path.parent} was begun with other settings: {changes}. Pass another --output_dir, or delete the "
                "folder."
            )


def write_page(plan: Sequence[PlanEntry], arguments: PaperArguments):
    """Writes the page of what has results so far."""
    path = Path(arguments.output_dir, "README.md")
    page = paper_page(plan, path.parent, [Path(folder) for folder in arguments.others or []])
    write_lines(path, [page])
    if arguments.page is not None:
        update_page(Path(arguments.page), page)
    print(f"{path}: tables beside those of the paper")


def read_plan(path: Path) -> list[PlanEntry]:
    """The experiments of a plan.

    Raises:
        ValueError: an entry lacks a key, or has an unknown program, the name of another, or a biLM that none trains.
    """
    plan = read_json(path)
    if not isinstance(plan, list) or not plan:
        raise ValueError(f"{path} is not a plan; it must hold a list of experiments.")
    for number, entry in enumerate(plan, 1):
        missing = [key for key in PLAN_KEYS if not (isinstance(entry, dict) and key in entry)]
        if missing:
            raise ValueError(f"{path}, experiment {number} lacks {', '.join(missing)}.")
        if entry["program"].split()[0] not in MODULES:
            raise ValueError(f"{path}, experiment {number}: {entry['program']!r} is none of {', '.join(MODULES)}.")
    names = [entry["name"] for entry in plan]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{path} has {twice[0]!r} twice; give each experiment its own name.")
    bilms = [entry["name"] for entry in plan if entry["program"] == "pretrain"]
    for entry in plan:
        if "bilm" in entry and entry["bilm"] not in bilms:
            raise ValueError(
                f"{path}: {entry['name']} takes the biLM of {entry['bilm']!r}, which trains none; give the name of an "
                "experiment with the program 'pretrain'."
            )
    return plan


def planned(entry: PlanEntry, arguments: PaperArguments, digest: str) -> PlannedExperiment:
    """The command of an entry. `digest` is that of the model.

    Raises:
        FileNotFoundError: a file of the entry is missing.
    """
    program, *task = entry["program"].split()
    folder, options = Path(arguments.output_dir, entry["name"]), dict(entry["options"])
    files = {name: Path(arguments.data, file) for name, file in entry["files"].items()}
    if absent := [path for path in files.values() if not path.is_file()]:
        raise FileNotFoundError(
            f"{absent[0]}, of the experiment {entry['name']}, does not exist. Put it there, or leave the experiment "
            "out with --only."
        )
    members, model = 0, arguments.model_name_or_path
    if "bilm" in entry:
        model = str(trained_bilm(Path(arguments.output_dir, entry["bilm"])))
    if program == "pretrain":
        trained = trained_bilm(folder)
        options |= {"model_name_or_path": model, "output_dir": trained}
        options |= {"resume_from_checkpoint": "last"} if any(trained.glob("checkpoint-*")) else {}
        options |= {"use_cpu": True} if arguments.use_cpu else {}
    elif program == "reproduce":
        layers = ELMoConfig.from_pretrained(arguments.model_name_or_path).num_hidden_layers
        arms = experiment_arms(options.get("ablation"), options.get("compare_baseline", False), True, layers)
        seeds = arguments.seeds or options.get("seeds", 1)
        options |= {"seeds": seeds, "output_dir": folder, "model_name_or_path": model}
        options |= {"reuse_from": arguments.output_dir}
        options |= {"use_cpu": True} if arguments.use_cpu else {}
        members = len(arms) * seeds
    else:
        options |= {"model": model, "output": folder / "results" / f"{program}.json"}
        options |= {"device": "cpu"} if arguments.use_cpu else {}
    positional = [str(files.pop("text"))] if "text" in files else []
    module = f"modeling_elmo.run_scripts.{MODULES[program]}"
    command = [sys.executable, "-m", module, *task, *positional, *option_words({**files, **options})]
    return PlannedExperiment(entry["name"], command, folder, members, begun_with(entry, digest))


def option_words(options: dict[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if value is True or value is False:
            yield f"--{name}" if value else f"--no_{name}"
        else:
            yield from (f"--{name}", str(value))


def run_side_by_side(experiments: Sequence[PlannedExperiment], processes: int) -> list[PlannedExperiment]:
    """Runs experiments with a bar over their models. Returns those that failed."""
    total = sum(each.members or 1 for each in experiments)
    threads = max(1, torch.get_num_threads() // processes)
    with ThreadPoolExecutor(processes) as pool, tqdm(total=total, unit="model", disable=not experiments) as bar:
        running = {pool.submit(run_command, each, threads): each for each in experiments}
        pending, failed = set(running), []
        try:
            while pending:
                ended, pending = wait(pending, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                failed += [running[future] for future in ended if future.result()]
                show_progress(bar, experiments, processes)
        except BaseException:  # Ctrl-C reaches the running commands, too; those that wait must not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def run_command(experiment: PlannedExperiment, threads: int) -> int:
    """The exit status of the command, whose output goes to a file in its folder."""
    write_json(experiment.folder / PLAN_SETTINGS, experiment.settings)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with (experiment.folder / PLAN_OUTPUT).open("ab") as log:
        return subprocess.run(experiment.command, stdout=log, stderr=log, env=environment).returncode


def show_progress(bar: tqdm, experiments: Sequence[PlannedExperiment], processes: int):
    records = [each.records() for each in experiments]
    pairs = zip(experiments, records, strict=True)
    bar.n = sum(min(len(found), each.members) if each.members else each.is_finished() for each, found in pairs)
    seconds = time_left([each.members for each in experiments], records, processes)
    bar.set_postfix_str("" if seconds is None else f"at least {seconds / 3600:.1f} h left")
    bar.refresh()


def time_left(members: Sequence[int], records: Sequence[list[dict[str, Any]]], processes: int) -> float | None:
    """An estimate in seconds, from the finished models of each experiment that has one; `None` before the first."""
    seconds = []
    for number, finished in zip(members, records, strict=True):
        if found := [record["seconds"] for record in finished if "seconds" in record]:
            seconds.append(sum(found) / len(found) * max(0, number - len(finished)))
    return sum(seconds) / processes if seconds else None


def progress_line(experiment: PlannedExperiment) -> str:
    """How much of an experiment is finished, and how long a model of it takes."""
    records, finished = experiment.records(), experiment.is_finished()
    parts = [f"{experiment.name}: {'finished' if finished else 'not finished'}"]
    if experiment.members:
        parts.append(f"models: {len(records)}" + ("" if finished else f" of {experiment.members}"))
    if minutes := [record["seconds"] / 60 for record in records if "seconds" in record]:
        parts.append(f"{sum(minutes) / len(minutes):.1f} minutes for each")
    return ", ".join(parts)


def last_line(experiment: PlannedExperiment) -> str:
    lines = (experiment.folder / PLAN_OUTPUT).read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.rsplit("\r", 1)[-1].strip() for line in reversed(lines) if line.strip()), "no output")
