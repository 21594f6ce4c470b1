"""Plans of experiments: what runs, what is skipped, what fails; and the plan that we ship."""

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from endings import conclusion
from errors import refused
from places import ROOT
from pretraining_worker import arguments_of
from safetensors.torch import load_file
from task_worker import HEAD, TASKS, bilm, read_json, sentences_of, written

from modeling_elmo.run_scripts import reproduce
from modeling_elmo.run_scripts.experiments import paper
from modeling_elmo.run_scripts.experiments.paper import (
    PLAN,
    PaperArguments,
    fold_options,
    planned,
    progress_line,
    read_plan,
)
from modeling_elmo.run_scripts.experiments.paper_page import PAGE_BEGIN, PAGE_END, paper_page, update_page
from modeling_elmo.run_scripts.experiments.reports import write_records
from modeling_elmo.run_scripts.fine_tuning.data import DataArguments, split_sources
from modeling_elmo.run_scripts.modeling_elmo_cli import PROGRAMS
from modeling_elmo.run_scripts.program.command_line import ProgramParser

SHIPPED = ROOT / "model_cards"
ENTITIES = {
    "name": "entities",
    "program": "reproduce ner",
    "title": "entities, F1",
    "table": "1",
    "files": {"train_file": "wnut17_train.conll", "validation_file": "wnut17_dev.conll"},
    "options": {"compare_baseline": True, "max_steps": 1, "config_overrides": json.dumps(HEAD)},
}
USES = {"name": "uses", "program": "neighbors", "title": "uses of a", "table": "4", "files": {"text": "wnut17.txt"}}
USES["options"] = {"word": "the", "queries": 1}


@pytest.fixture
def place(tmp_path) -> Path:
    bilm(tmp_path / "bilm", vocab=["<PAD>", "<S>", "</S>", "<UNK>", "the", "a"])
    (tmp_path / "data").mkdir()
    for file in TASKS.glob("wnut17_*"):
        (tmp_path / "data" / file.name).symlink_to(file)
    lines = [" ".join(words) for words, _ in sentences_of(TASKS / "wnut17_train.conll")]
    written(tmp_path / "data" / "wnut17.txt", "\n".join(lines))
    return tmp_path


def planned_in(place: Path, entry: dict):
    return planned(entry, PaperArguments(**{name: str(path) for name, path in arguments_in(place).items()}), "digest")


def planned_entities(place: Path, **changes):
    return planned_in(place, {**ENTITIES, **changes})


def touch_files(place: Path, plan: list[dict]):
    for file in (file for entry in plan for file in entry["files"].values()):
        (place / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (place / "data" / file).touch()


def arguments_in(place: Path) -> dict[str, Path]:
    return {"model_name_or_path": place / "bilm", "data": place / "data", "output_dir": place / "paper"}


def run(place: Path, *entries: dict, **options) -> list[dict]:
    plan = place / "plan.json"
    written(plan, json.dumps(entries))
    options = {**arguments_in(place), "plan": plan, "use_cpu": True, **options}
    return reproduce.main(["all", *arguments_of(options)])


# Numbers of models. One experiment was done with fewer seeds.
SHIPPED_RECORDS = {"elmo-small-en": (125, ["entailment_placement"]), "elmo-small-en-14M": (211, [])}


@pytest.mark.parametrize("name", SHIPPED_RECORDS)
def test_shipped_records_are_of_the_shipped_plan_and_model(name, place, monkeypatch):
    """The plan skips what they hold: nothing runs, and no file changes. Those of 14 million words had other weights."""
    folder = place / "paper"
    shutil.copytree(SHIPPED / "experiments" / name, folder)
    files = {path: path.read_text("utf-8") for path in folder.rglob("records.jsonl")}
    assert files and not any(re.search(r'"(/|~|\.\.|file:)', text) for text in files.values())  # folders of a disk
    if name == "elmo-small-en-14M":
        monkeypatch.setattr(paper, "model_digest", lambda _: "32b94fe6620ade9c")
    monkeypatch.setattr(paper, "run_command", lambda *_, **__: pytest.fail("a finished experiment ran again"))
    plan = [entry for entry in read_plan(PLAN) if (folder / entry["name"]).is_dir()]
    touch_files(place, plan)
    digest = paper.model_digest(str(SHIPPED / "elmo-small-en"))
    paper.check_begun(plan, folder, digest)
    model = SHIPPED / "elmo-small-en"
    arguments = PaperArguments(model_name_or_path=str(model), data=str(place / "data"), output_dir=str(folder))
    finished = [entry for entry in plan if planned(entry, arguments, digest).is_finished()]
    number, others = SHIPPED_RECORDS[name]
    assert [entry["name"] for entry in plan if entry not in finished] == others
    assert len(run(place, *plan, model_name_or_path=model, dry_run=True)) == number
    records = run(place, *finished, model_name_or_path=model)
    assert files == {path: path.read_text("utf-8") for path in folder.rglob("records.jsonl")}
    assert all({"settings", "arm", "seed"} <= record.keys() for record in records)


def test_pages_are_made_of_the_shipped_records(tmp_path):
    """So neither they nor Table 1 of RESULTS.md can say anything else."""
    folder, results = tmp_path / "experiments", SHIPPED.parent / "docs" / "RESULTS.md"
    shutil.copytree(SHIPPED / "experiments", folder)
    document = Path(shutil.copy(results, tmp_path))
    for name, others in (("elmo-small-en-14M", []), ("elmo-small-en", [folder / "elmo-small-en-14M"])):
        page = paper_page(read_plan(PLAN), folder / name, others)
        assert f"{page}\n" == (SHIPPED / "experiments" / name / "README.md").read_text("utf-8")
    update_page(document, page)
    assert document.read_bytes() == results.read_bytes()


@pytest.mark.slow
def test_a_plan_runs_side_by_side_once_and_fails_alone(place, monkeypatch, capsys):
    (place / "PAGE.md").write_text(f"{PAGE_BEGIN}\n{PAGE_END}\n")
    broken = {**ENTITIES, "name": "broken", "options": {"max_steps": 1, "seeds": 2, "elmo_placement": "nowhere"}}
    options = {"processes": 2, "page": place / "PAGE.md"}
    with refused("1 experiments have failed. The same command repeats them", ChildProcessError) as error:
        run(place, ENTITIES, broken, USES, **options)
    assert re.search(r"\nbroken: .*--elmo_placement.*'nowhere'.* \(see .*broken.output\.log\)", str(error.value))
    assert "3 experiments, 0 of them finished before" in capsys.readouterr().out
    page = (place / "paper" / "README.md").read_text("utf-8")
    for expected in ("## Table 1", "entities, F1", "## Figure 2", "## Table 4", "Without results so far: broken."):
        assert expected in page
    document = (place / "PAGE.md").read_text("utf-8")
    assert "entities, F1" in document
    monkeypatch.setattr(paper, "run_command", lambda *_, **__: pytest.fail("a finished experiment ran again"))
    records = run(place, ENTITIES, USES, **options)
    assert sorted((record["arm"], record["seed"]) for record in records) == [("baseline", 42), ("elmo", 42)]
    assert (place / "PAGE.md").read_text("utf-8") == document


def test_each_arm_needs_its_models(place):
    """More seeds of one arm do not stand for another arm."""
    experiment = planned_entities(place, options={**ENTITIES["options"], "seeds": 2})
    records = [{"arm": arm, "seed": seed} for arm in ("elmo", "baseline") for seed in range(5)]
    for number in (5, 6, 7):
        write_records(experiment.folder, experiment.settings, records[:number])
        assert experiment.is_finished() == (number == 7)
        shown = "finished, models: 7" if number == 7 else f"not finished, models: {number - 3} of 4"
        assert progress_line(experiment) == f"entities: {shown}"


def test_a_plan_of_baselines_finishes(place):
    changes = {"compare_baseline": False, "use_elmo": False, "seeds": 1}
    experiment = planned_entities(place, options={**ENTITIES["options"], **changes})
    write_records(experiment.folder, experiment.settings, [{"arm": "baseline", "seed": 42}])
    assert experiment.is_finished() and "--no_use_elmo" in experiment.commands[0]


def test_an_option_may_have_several_files(place):
    files = {"train_file": ["wnut17_train.conll", "wnut17_dev.conll"]}
    (command,) = planned_entities(place, files=files).commands
    first = command.index("--train_file") + 1
    assert command[first : first + 2] == [str(place / "data" / name) for name in files["train_file"]]


def test_a_page_without_its_place_is_refused_before_training(place):
    (place / "PAGE.md").write_text("no marks\n")
    with refused("PAGE.md must have the lines"):
        run(place, ENTITIES, page=place / "PAGE.md")
    assert not (place / "paper").exists()


@pytest.mark.slow
def test_a_page_is_of_one_model_and_one_plan_and_a_dry_run_writes_it(place, capsys):
    run(place, ENTITIES, USES)
    page = place / "paper" / "README.md"
    text = page.read_text("utf-8")
    capsys.readouterr()
    run(place, ENTITIES, USES, {**USES, "name": "others"}, dry_run=True, seeds=2)
    lines = capsys.readouterr().out.split("\n")
    assert re.fullmatch(r"entities: not finished, models: 2 of 4, \d+\.\d minutes for each", lines[0])
    assert lines[1:3] == ["uses: finished", "others: not finished"] and not (place / "paper" / "others").exists()
    told, following = conclusion("\n".join(lines).rstrip())
    assert told.startswith(f"1 of 3 experiments are finished; {page} compares")
    assert "--seeds" in following and "--dry_run" not in following and str(place / "paper") in following
    assert page.read_text("utf-8") == f"{text.rstrip()}\n\nWithout results so far: others.\n"
    without = {**ENTITIES, "options": {**ENTITIES["options"], "compare_baseline": False}}
    run(place, without, USES, dry_run=True)  # one arm less is no other plan
    printed = capsys.readouterr().out
    assert printed.startswith("entities: finished, models: 2, ")
    assert conclusion(printed)[1][-2:] == ["--others", str(place / "paper")]
    page.unlink()
    with patch.object(paper, "run_command", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run(place, USES, ENTITIES, seeds=2)
    assert page.read_text("utf-8") == text
    with refused("--others elsewhere", FileNotFoundError):
        run(place, ENTITIES, others="elsewhere")
    changed = {**USES, "options": {**USES["options"], "queries": 2}}
    with refused("uses was started with other settings: queries 1, now 2", FileExistsError):
        run(place, ENTITIES, changed)
    bilm(place / "bilm", vocab=["<PAD>", "<S>", "</S>", "<UNK>", "the", "a"], seed=1)
    with refused("entities was started with other settings: model_digest '", FileExistsError):
        run(place, ENTITIES, USES)


@pytest.mark.slow
def test_a_task_takes_the_bilm_that_was_trained_further(place):
    options = {"max_steps": 2, "is_split_into_words": True, "report_to": "none"}
    files = {"train_file": "wnut17.txt", "validation_file": "wnut17.txt"}
    text = {"name": "text", "program": "pretrain", "title": "posts", "table": "domain", "files": files}
    text |= {"options": options, "paper": {"task": "SNLI", "perplexities": [72.1, 16.8]}}
    after = {**ENTITIES, "name": "after", "table": "domain", "bilm": "text", "beside": "entities"}
    after["options"] = {key: value for key, value in ENTITIES["options"].items() if key != "compare_baseline"}
    records = run(place, after, ENTITIES, text)
    trained = place / "paper" / "text" / "bilm"
    log = read_json(trained / "results" / "pretraining.json")["log"]
    first, *_, last = [entry["perplexity"] for entry in log if "perplexity" in entry]
    page = (place / "paper" / "README.md").read_text("utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.split("\n") if line.startswith("|")]
    assert ["posts", f"{first:.1f}", f"{last:.1f}"] in cells and ["the paper: SNLI", "72.1", "16.8"] in cells
    scores = [f"{100 * record['metrics']['validation']['f1']:.2f}" for record in records]
    assert ["entities, F1, after posts", "1 run", scores[-1], scores[0]] in cells
    weights = load_file(place / "paper" / "after" / "model.safetensors")
    name = "elmo.forward_lstm.layers.0.state_linear.weight"
    new, old = (load_file(folder / "model.safetensors")[name] for folder in (trained, place / "bilm"))
    assert torch.equal(weights[name], new) and not torch.equal(new, old)
    assert run(place, after, ENTITIES, text) == records  # nothing runs again
    shutil.rmtree(trained)  # as on another disk, which has the records only
    assert run(place, after, ENTITIES, text) == records and not (trained / "config.json").exists()
    for file in ("record.json", "records.jsonl"):
        (place / "paper" / "after" / file).unlink()
    again = run(place, after, ENTITIES, text, only=["text", "after"])
    assert again[0]["metrics"] == records[0]["metrics"] and (trained / "config.json").is_file()


@pytest.mark.slow
def test_the_shipped_plan_names_options_that_exist(place):
    plan, output = read_plan(PLAN), place / "paper"
    for entry in plan:
        if "bilm" in entry:
            shutil.copytree(place / "bilm", output / entry["bilm"] / "bilm")
    touch_files(place, plan)
    assert {entry["table"] for entry in plan} == {"1", "2", "3", "4", "5", "6", "domain", "figure 1"}
    for entry in plan:
        experiment = planned_in(place, entry)
        assert len(experiment.commands) == entry.get("folds", 1)
        for options in map(parsed, experiment.commands):
            written_to = options.get("output_dir") or options["output"]
            assert Path(written_to).is_relative_to(output / entry["name"])
            if entry["program"].startswith("reproduce"):
                arms = {"1": 2, "2": 5, "3": 3, "domain": 1, "figure 1": 6}[entry["table"]]
                assert experiment.runs == entry.get("folds", options["seeds"]) and len(experiment.arms) == arms
                assert options["reuse_from"] == [str(output)]


def parsed(command: list[str]) -> dict:
    """The options that the program of a command reads, without running it."""
    program, *words = command[command.index("-m") + 2 :]
    parse, found = ProgramParser.parse, {}

    def parse_and_stop(self, arguments):
        groups = parse(self, arguments)
        for group in groups if isinstance(groups, tuple) else [groups]:
            found.update(vars(group))
        raise KeyboardInterrupt

    main = import_module(f"modeling_elmo.run_scripts.{PROGRAMS[program][0]}").main
    with patch.object(ProgramParser, "parse", parse_and_stop), pytest.raises(KeyboardInterrupt):
        main(words)
    return found


def test_folds_divide_all_files(tmp_path):
    """Each row is in the test data of one fold, in the validation data of the one before it, and else trained on."""
    every, paths = [], {}
    for split, count in (("train", 23), ("validation", 7), ("test", 10)):
        rows = [f"{split} {number}" for number in range(count)]
        paths[f"{split}_file"] = str(written(tmp_path / f"{split}.tsv", "\n".join(rows)))
        every += rows
    read, folds = {".tsv": lambda path: iter(path.read_text().split("\n"))}, []
    for fold in range(5):
        options = fold_options(fold, 5)
        assert (options.pop("seed"), options.pop("seeds")) == (fold, 1)
        sources = split_sources(DataArguments(**paths, **options), read)
        folds.append({split: list(source.read()) for split, source in sources.items()})
        assert sorted(row for split in folds[-1].values() for row in split) == sorted(every) and all(folds[-1].values())
    assert [fold["test"] for fold in folds[1:]] == [fold["validation"] for fold in folds[:-1]]
    assert sorted(row for fold in folds for row in fold["test"]) == sorted(every)


@pytest.mark.parametrize(
    "entries, options, received",
    [
        ([], {}, "plan.json is not a plan"),
        ([{"name": "a"}], {}, "plan.json, experiment 1 lacks program, title, table, files, options"),
        ([{**USES, "program": "embed"}], {}, "experiment uses: program 'embed'.*senses"),
        ([{**USES, "bilm": "text"}], {}, "experiment uses: bilm 'text'"),
        ([{**USES, "program": ""}], {}, "experiment uses: program ''.*senses"),
        ([{**USES, "options": []}], {}, "experiment uses: files and options must be objects"),
        ([{**ENTITIES, "program": "reproduce"}], {}, "experiment entities: program 'reproduce' must be .*ner"),
        ([{**ENTITIES, "options": {"ablation": "a"}}], {}, "experiment entities: ablation 'a' is not one of layers"),
        ([{**ENTITIES, "options": {"seeds": "2"}}], {}, "experiment entities: seeds is '2'; pass a number above 0"),
        ([{**ENTITIES, "folds": 2}], {}, "experiment entities: folds is 2; pass 3 or more"),
        ([{**ENTITIES, "fold": 10}], {}, "experiment entities: fold is not one of name, .*, folds"),
        ([{**ENTITIES, "table": "7"}], {}, "entities: table '7' of reproduce is not one of '1' .reproduce.,"),
        ([{**ENTITIES, "table": 1}], {}, "experiment entities: table 1 of reproduce is not one of '1' .reproduce.,"),
        ([{**USES, "table": "5"}], {}, "experiment uses: table '5' of neighbors is not one of .* '4' .neighbors.,"),
        ([{**ENTITIES, "table": "domain"}], {}, "experiment entities: table 'domain' .* pass bilm and beside"),
        ([{**ENTITIES, "beside": "tags"}], {}, "experiment entities: beside 'tags' is not an experiment"),
        ([{**ENTITIES, "paper": {"elmo": 92.2}}], {}, "experiment entities: paper lacks task, baseline"),
        ([{**ENTITIES, "paper": 92.2}], {}, "experiment entities: paper lacks task, baseline, elmo"),
        ([USES, USES], {}, "experiment uses is in the plan twice"),
        ([USES], {"only": ["use"]}, "--only use.*uses"),
        ([{**USES, "files": {"text": "no.txt"}}], {}, "no.txt, of the experiment uses, .*--only"),
    ],
)
def test_wrong_plans_and_options(place, entries, options, received):
    with refused(received, (ValueError, FileNotFoundError)):
        run(place, *entries, **options)
    assert not (place / "paper").exists()
