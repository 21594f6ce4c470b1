"""Vectors of a corpus equal the model's vectors of each sentence alone, also after interruptions."""

import copy
import errno
import glob
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from unittest.mock import MagicMock

import datasets
import h5py
import numpy as np
import psutil
import pytest
import torch
from pretraining_worker import torchrun, two_machines

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoModel, ELMoTokenizer
from modeling_elmo.conversion.formats import convert_checkpoint, load_for_export
from modeling_elmo.conversion.original import OriginalCheckpoint
from modeling_elmo.kernels.int8 import int8_obstacle
from modeling_elmo.run_scripts import embed
from modeling_elmo.run_scripts.program import processes
from modeling_elmo.run_scripts.program.models import load_pretrained
from modeling_elmo.run_scripts.vectors import embedding, outputs
from modeling_elmo.run_scripts.vectors.lines import fasta_records

ROOT = Path(__file__).parents[1]
TOLERANCE = 2e-6
DIM, LAYERS = 12, 3
LINES = [
    "The play was staged in Paris .",
    "",
    "They play chess",
    "밥 말이 😀 <S> \u00e9",
    "The play was staged in Paris .",  # twice
    "one",
    "   ",
    "a longer sentence so that the batch of these lines has to be padded a good deal , word after word after word",
    "They  play\tchess",  # other white space
]
PROTEINS = ROOT / "tests" / "fixtures" / "proteins" / "proteins.fasta"


def tiny(**options) -> ELMoConfig:
    filters = [[1, 4], [2, 8]]
    return ELMoConfig(char_cnn_filters=filters, projection_size=DIM // 2, lstm_hidden_size=10, **options)


def save_model(folder: Path, model) -> Path:
    model.save_pretrained(folder)
    ELMoTokenizer(pre_tokenization="moses").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = ELMoModel(tiny())
    with torch.no_grad():
        model.scalar_mix.weights.copy_(torch.tensor([0.3, -1.0, 2.0]))
        model.scalar_mix.gamma.fill_(1.7)
    return save_model(tmp_path_factory.mktemp("model"), model)


@pytest.fixture(scope="module")
def loaded(model_dir):
    return ELMoModel.from_pretrained(model_dir).eval(), ELMoTokenizer.from_pretrained(model_dir)


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_lines(tmp_path / "corpus.txt", LINES)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="")
    return path


def flags_of(model_dir: Path | str, output: Path | str, options: dict) -> list[str]:
    flags = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in options.items()]
    return ["--model", str(model_dir), "--output", str(output), *sum(flags, [])]


def run(model_dir: Path | str, output: Path | str, **options) -> Path:
    return embed.main(flags_of(model_dir, output, options))


@torch.no_grad()
def alone(loaded, words: list[str] | str, layers: str = "all", pooling: str = "none") -> np.ndarray:
    """The reference: the model called on one sentence."""
    model, tokenizer = loaded
    output = model(**tokenizer([words], is_split_into_words=not isinstance(words, str), return_tensors="pt"))
    stack = np.stack([layer[0, 1:-1].numpy() for layer in output.hidden_states])
    weights = np.exp([0.3, -1.0, 2.0]) / np.exp([0.3, -1.0, 2.0]).sum()
    vectors = {
        "all": stack,
        "top": stack[-1],
        "average": (stack[0] + stack[1] + stack[2]) / 3,
        "sum": stack[0] + stack[1] + stack[2],
        "mixed": 1.7 * np.tensordot(weights, stack, 1),
    }[layers]
    if pooling == "none":
        return vectors
    if not words:
        return np.zeros((LAYERS, DIM) if layers == "all" else DIM)
    return vectors.sum(-2) / len(words) if pooling == "mean" else vectors.max(-2)


def read_table(path: Path) -> datasets.Dataset:
    return datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(path.parent))


def read(path: Path) -> list[np.ndarray]:
    """The vectors of each line, as a user would read them."""
    if path.suffix == ".parquet":
        return [np.array(row) if row else row for row in read_table(path)["vectors"]]
    with h5py.File(path) as file:
        names = sorted(set(file) - {"sentence_to_index"}, key=lambda name: (len(name), name))
        if names == ["sentence_vectors"]:
            return list(file["sentence_vectors"][:])
        assert names == [str(number) for number in range(len(names))]
        return [file[name][:] for name in names]


def assert_close(found: list, expected: list[np.ndarray], tolerance: float = TOLERANCE):
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if other.size:
            assert np.shape(one) == other.shape, number
            assert np.abs(one - other).max() <= tolerance, number
        else:
            assert np.size(one) == 0, number


@pytest.mark.parametrize(
    "suffix, layers, pooling",
    [
        *((".hdf5", layers, "none") for layers in ("all", "top", "average", "sum")),
        *((".h5", "mixed", "none"), (".parquet", "all", "none")),
        *((".hdf5", "all", "mean"), (".h5", "mixed", "max"), (".parquet", "all", "max")),
    ],
)
def test_each_line_has_the_vectors_that_it_has_alone(model_dir, loaded, corpus, tmp_path, suffix, layers, pooling):
    options = {"input": corpus, "layers": layers, "pooling": pooling, "batch_tokens": 40}
    path = run(model_dir, tmp_path / f"vectors{suffix}", **options)
    assert not Path(f"{path}.parts").exists()
    if suffix == ".parquet":
        assert read_table(path)["text"][:] == [line.strip() for line in LINES]
        assert read_table(path)["tokens"][:] == [line.split() for line in LINES]
    assert_close(read(path), [alone(loaded, line.split(), layers, pooling) for line in LINES])


def test_hdf5_has_the_layout_of_the_elmo_command(model_dir, corpus, tmp_path):
    with h5py.File(run(model_dir, tmp_path / "v.hdf5", input=corpus)) as file:
        assert file["0"].shape == (LAYERS, 7, DIM) and file["0"].dtype == np.float32
        assert file["1"].shape == file["6"].shape == (LAYERS, 0, DIM)
        assert file["sentence_to_index"].shape == (1,)
        index = json.loads(file["sentence_to_index"][0])
        assert index == {line.strip(): str(number) for number, line in enumerate(LINES)}
        assert index[LINES[0]] == "4" and np.allclose(file["0"], file["4"], atol=TOLERANCE)
    with h5py.File(run(model_dir, tmp_path / "f.hdf5", input=corpus, forget_sentences=True)) as file:
        assert set(file) == set(map(str, range(len(LINES))))


@pytest.mark.parametrize("suffix", [".hdf5", ".parquet"])
def test_float16(model_dir, loaded, corpus, tmp_path, suffix):
    found = read(run(model_dir, tmp_path / f"v{suffix}", input=corpus, dtype="float16", layers="top"))
    assert_close(found, [alone(loaded, line.split(), "top").astype(np.float16) for line in LINES], 1e-3)
    assert suffix == ".parquet" or found[0].dtype == np.float16
    model = ELMoModel(tiny())
    torch.nn.init.constant_(model.token_projection.bias, 1e5)
    with pytest.raises(ValueError, match="Vectors of 'a longer .* are too large for float16, .* dtype float32"):
        run(save_model(tmp_path / "m", model), tmp_path / "large.hdf5", input=corpus, dtype="float16")


def test_bfloat16_computation(model_dir, loaded, corpus, tmp_path):
    found = read(run(model_dir, tmp_path / "v.hdf5", input=corpus, compute_dtype="bfloat16", layers="top"))
    assert found[0].dtype == np.float32
    assert_close(found, [alone(loaded, line.split(), "top") for line in LINES], 0.05)


@pytest.mark.parametrize("obstacle", [None, "this processor has no instructions for bfloat16"])
def test_without_its_instructions_bfloat16_becomes_float32(obstacle, model_dir, corpus, tmp_path, monkeypatch):
    """The settings of the unfinished output name what was computed."""
    monkeypatch.setattr(processes, "bfloat16_obstacle", lambda: obstacle)
    monkeypatch.setattr(outputs.PartsFolder, "assemble", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(model_dir, tmp_path / "v.hdf5", input=corpus, compute_dtype="bfloat16", layers="top")
    settings = json.loads((tmp_path / "v.hdf5.parts" / "settings.json").read_text(encoding="utf-8"))
    assert settings["compute_dtype"] == ("bfloat16" if obstacle is None else "float32")


@pytest.mark.skipif(int8_obstacle() is not None, reason=f"8 bits are not fast here: {int8_obstacle()}")
def test_int8_computation(model_dir, loaded, corpus, tmp_path):
    found = read(run(model_dir, tmp_path / "v.hdf5", input=corpus, compute_dtype="int8", layers="top"))
    assert found[0].dtype == np.float32
    quantized = (copy.deepcopy(loaded[0]).quantize(), loaded[1])
    assert_close(found, [alone(quantized, line.split(), "top") for line in LINES], 1e-2)
    with pytest.raises(ValueError, match="--compute_dtype int8 is for CPUs, not for --device cuda; pass bfloat16."):
        run(model_dir, tmp_path / "w.hdf5", input=corpus, compute_dtype="int8", device="cuda")


def test_raw_text_is_split_by_the_tokenizer(model_dir, loaded, tmp_path):
    texts = ["They didn't play chess, did they?", "", "One."]
    path = run(model_dir, tmp_path / "v.parquet", input=write_lines(tmp_path / "c.txt", texts), raw_text=True)
    words = [["They", "didn", "'t", "play", "chess", ",", "did", "they", "?"], [], ["One", "."]]
    assert read_table(path)["tokens"][:] == words
    assert_close(read(path), [alone(loaded, line) for line in words])
    assert_close(read(path), [alone(loaded, line) for line in texts])


def test_given_words_stay_whole(model_dir, loaded, tmp_path):
    words = ["New York", "", "\ud800", "<S>", "can't"]
    path = write_lines(tmp_path / "c.jsonl", [json.dumps({"words": words}), json.dumps({"words": "can't"})])
    table = run(model_dir, tmp_path / "v.parquet", input=path, text_column="words", raw_text=True)
    assert_close(read(table), [alone(loaded, words), alone(loaded, ["can", "'t"])])


@pytest.mark.parametrize("options", [{"split": "test"}, {"streaming": True}], ids=str)
def test_data_sets(model_dir, loaded, tmp_path, options):
    data, folder = datasets.Dataset.from_dict({"words": [line.split() for line in LINES]}), tmp_path / "data"
    if "split" in options:
        datasets.DatasetDict(train=data.select([0]), test=data).save_to_disk(folder)
    else:
        data.to_parquet(folder / "train.parquet")
    found = read(run(model_dir, tmp_path / "v.hdf5", dataset=folder, text_column="words", **options))
    assert_close(found, [alone(loaded, line.split()) for line in LINES])


# Proteins: SeqVec's format and use

SEQUENCES = {each.name: each.text for _, each in fasta_records(PROTEINS)}


@pytest.mark.parametrize("batch_tokens", [1, 300])  # sequences alone, in two batches
def test_proteins(model_dir, loaded, tmp_path, batch_tokens):
    options = {"input": PROTEINS, "layers": "sum", "unit": "character", "batch_tokens": batch_tokens}
    with h5py.File(run(model_dir, tmp_path / "residues.h5", **options)) as file:
        assert set(file) == {"sp|P01308|INS_HUMAN", "sp|P00698|LYSC_CHICK", "UBIQ_HUMAN_1-76"}
        found = [file[name.replace("/", "_")][:] for name in SEQUENCES]
    assert_close(found, [alone(loaded, list(residues), "sum") for residues in SEQUENCES.values()], 1e-5)
    with h5py.File(run(model_dir, tmp_path / "proteins.h5", **options, pooling="mean")) as file:
        means = [file[name.replace("/", "_")][:] for name in SEQUENCES]
    assert_close(means, [vectors.mean(0) for vectors in found], 1e-5)


@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_proteins_as_a_table(model_dir, loaded, tmp_path, pooling):
    (tmp_path / "p.fa.gz").write_bytes(gzip.compress(PROTEINS.read_bytes()))
    path = run(model_dir, tmp_path / "v.parquet", input=tmp_path / "p.fa.gz", layers="sum", pooling=pooling)
    table = read_table(path)
    assert table.column_names == ["name", "text", "tokens", "vectors"]
    assert table["name"][:] == list(SEQUENCES) and table["text"][:] == list(SEQUENCES.values())
    assert table["tokens"][:] == [list(residues) for residues in SEQUENCES.values()]
    expected = [alone(loaded, list(residues), "sum") for residues in SEQUENCES.values()]
    assert_close(read(path), expected if pooling == "none" else [vectors.mean(0) for vectors in expected], 1e-5)


def test_letters_of_a_text(model_dir, tmp_path):
    texts = ["MKL VF*", "", "밥a", json.dumps("x")]
    path = run(model_dir, tmp_path / "v.parquet", input=write_lines(tmp_path / "c.txt", texts), unit="character")
    assert read_table(path)["tokens"][:] == [list("MKLVF*"), [], ["밥", "a"], list('"x"')]


def test_word_level_model(tmp_path, corpus):
    config = tiny(char_vocab_size=0, word_embedding_size=6, vocab_size=6)
    model, tokenizer = ELMoModel(config).eval(), ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", "play", "chess"])
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    found = read(run(tmp_path / "m", tmp_path / "v.hdf5", input=corpus))
    with torch.no_grad():
        ids = torch.tensor([[1, 3, 4, 5, 2]])
        expected = torch.stack(model(input_ids=ids).hidden_states)[:, 0, 1:-1].numpy()
    assert_close([found[2]], [expected])


# Memory


def test_sentences_are_read_as_they_are_needed(loaded):
    read_so_far = 0

    def endless():
        nonlocal read_so_far
        for number in count():
            read_so_far += 1
            yield ["word"] * (number % 5)

    vectors = embedding.embed_sentences(endless(), *loaded, batch_tokens=50)
    for number in range(1000):
        tokens, found = next(vectors)
        assert tokens == ["word"] * (number % 5) and found.shape == (number % 5, DIM)
        assert read_so_far - number <= 4 * 50 / 2  # four batches of blank lines, which are two markers


def test_sentences_may_be_texts_or_words(loaded):
    found = list(embedding.embed_sentences(["They didn't.", ["They", "didn't."], "", []], *loaded, layers="all"))
    assert [tokens for tokens, _ in found] == [["They", "didn", "'t", "."], ["They", "didn't."], [], []]
    assert_close([vectors for _, vectors in found], [alone(loaded, tokens) for tokens, _ in found])
    with pytest.raises(ValueError, match="has no mix of its layers"):
        next(embedding.embed_sentences(["a"], ELMoModel(tiny(), add_mixing_layer=False), loaded[1]))


# Interruptions


@pytest.fixture
def long_corpus(tmp_path) -> Path:
    random = np.random.default_rng(0)
    lines = [" ".join(f"w{n}" for n in random.integers(0, 300, random.integers(0, 25))) for _ in range(300)]
    return write_lines(tmp_path / "long.txt", lines)


def count_lines(monkeypatch) -> list[str]:
    """Returns a list that receives the text of each line that is embedded from now on."""
    embedded, embed_block = [], embed.embed_block

    def counted(lines, *arguments, **options):
        embedded.extend(line.text for line in lines)
        return embed_block(lines, *arguments, **options)

    monkeypatch.setattr(embed, "embed_block", counted)
    return embedded


def test_an_interruption_while_the_output_is_written(model_dir, corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(outputs.WRITERS, ".hdf5", (lambda path, *_: path.write_text("half a fi") / 0, "h5py", ""))
        with pytest.raises(ZeroDivisionError):
            run(model_dir, tmp_path / "v.hdf5", input=corpus)
    assert not (tmp_path / "v.hdf5").exists()
    embedded = count_lines(monkeypatch)
    assert len(read(run(model_dir, tmp_path / "v.hdf5", input=corpus))) == len(LINES) and embedded == []


def test_an_interruption_while_the_parts_are_removed(model_dir, corpus, tmp_path, monkeypatch):
    output, parts = tmp_path / "v.hdf5", tmp_path / "v.hdf5.parts"
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.setattr(outputs, "shutil", None)
        run(model_dir, output, input=corpus, batch_tokens=8)
    assert len(read(output)) == len(LINES) and parts.exists()
    with pytest.raises(FileExistsError, match="v.hdf5 exists; remove it or pass"):
        run(model_dir, output, input=corpus)
    output.unlink()
    next(parts.glob("*.npz")).unlink()
    assert len(read(run(model_dir, output, input=corpus))) == len(LINES) and not parts.exists()


@pytest.fixture
def interrupted(model_dir, corpus, tmp_path, monkeypatch) -> Path:
    """The output file of a run that was interrupted after two parts."""
    save, calls = outputs.PartsFolder.save, count()
    with monkeypatch.context() as patch:
        patch.setattr(outputs.PartsFolder, "save", lambda *args: save(*args) if next(calls) < 2 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model_dir, tmp_path / "v.hdf5", input=corpus, batch_tokens=4)
    return tmp_path / "v.hdf5"


def test_a_resumed_run_may_have_other_batches_and_more_lines(model_dir, loaded, interrupted, tmp_path):
    lines = [*LINES, "one more"]
    moved = write_lines(tmp_path / "moved.txt", lines)
    found = read(run(model_dir, interrupted, input=moved, batch_tokens=100))
    assert_close(found, [alone(loaded, line.split()) for line in lines])


def test_a_resumed_run_with_other_settings(model_dir, corpus, interrupted, tmp_path):
    for name, value in (("layers", "top"), ("pooling", "mean"), ("dtype", "float16"), ("raw_text", True)):
        with pytest.raises(ValueError, match=rf"parts has other settings: {name} \w+, now {value}\. Pass the"):
            run(model_dir, interrupted, input=corpus, **{name: value})
    with pytest.raises(ValueError, match=r"other settings: .*weights \w+, now \w+"):
        run(save_model(tmp_path / "other", ELMoModel(tiny())), interrupted, input=corpus)
    for file in ("config.json", "tokenizer_config.json"):
        changed = shutil.copytree(model_dir, tmp_path / file)
        content = json.loads((changed / file).read_text())
        (changed / file).write_text(json.dumps(content | {"cell_clip": 1.0, "pre_tokenization": "whitespace"}))
        with pytest.raises(ValueError, match=r"other settings: model \w+, now \w+\. "):
            run(changed, interrupted, input=corpus)


def test_a_resumed_run_with_another_input(model_dir, corpus, interrupted):
    message = r"v.hdf5.parts has other lines {} to \d. Pass the same input, or remove"
    for first, lines in ((1, ["other", *LINES[1:]]), (4, [*LINES[:3], "other", *LINES[4:]]), (1, LINES[:1])):
        with pytest.raises(ValueError, match=message.format(first)):
            run(model_dir, interrupted, input=write_lines(corpus, lines))


@pytest.mark.parametrize("damage, number", [("absent", 0), ("empty", 1), ("cut", 0), ("changed", 1)])
def test_a_damaged_part_is_computed_again(damage, number, model_dir, corpus, interrupted, monkeypatch):
    """Without the parts after it, also if the new parts have other sizes."""
    parts = sorted(Path(f"{interrupted}.parts").glob("*.npz"))
    part = parts.pop(number)
    kept = {number for other in parts for number in range(*map(int, other.stem.split("-")))}
    content = bytearray(part.read_bytes())
    content[200] ^= 1  # of the vectors
    part.write_bytes({"empty": b"", "cut": content[:-30]}.get(damage, content))
    if damage == "absent":
        part.unlink()
    whole = read(run(model_dir, interrupted.with_name("whole.hdf5"), input=corpus))
    embedded = count_lines(monkeypatch)
    found = read(run(model_dir, interrupted, input=corpus, batch_tokens=7))
    assert_close(found, whole)
    assert embedded == [line.strip() for number, line in enumerate(LINES) if number not in kept]


def test_parts_reach_the_disk_before_they_have_their_name(model_dir, corpus, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    replace, replaced = os.replace, []
    monkeypatch.setattr(os, "replace", lambda old, new: replaced.append(Path(old).stat().st_ino) or replace(old, new))
    run(model_dir, tmp_path / "v.hdf5", input=corpus)
    assert len(replaced) >= 3 and set(replaced) <= {*synced}  # settings, a part, the output


def test_a_full_disk(model_dir, corpus, interrupted, monkeypatch):
    """The error names the file, and the same command goes on."""

    def full(path, **arrays):
        path.write_bytes(b"some bytes")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as numpy: without the name of the file

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"No space left on device: .*v.hdf5.parts/\d+-"):
        patch.setattr(np, "savez", full)
        run(model_dir, interrupted, input=corpus)
    assert len(list(Path(f"{interrupted}.parts").iterdir())) == 3  # two parts and the settings
    assert len(read(run(model_dir, interrupted, input=corpus))) == len(LINES)


# Several processes


MODULE = ("-m", "modeling_elmo.run_scripts.embed")


def num_parts(output: Path) -> int:
    """`Path.glob` would raise where the folder goes away meanwhile."""
    return len(glob.glob("*.npz", root_dir=f"{output}.parts"))


@pytest.fixture
def of_one_process(model_dir, long_corpus, tmp_path) -> bytes:
    return run(model_dir, tmp_path / "one.hdf5", input=long_corpus, batch_tokens=32).read_bytes()


def with_children(launchers: list[subprocess.Popen]) -> list[psutil.Process]:
    """The launchers that still run, and their processes."""
    found = []
    for each in launchers:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found += [psutil.Process(each.pid), *psutil.Process(each.pid).children()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_process_of_two_machines_may_be_killed_at_any_moment(
    model_dir, long_corpus, of_one_process, tmp_path, seed
):
    """Also the main process and the launchers. Each machine has two processes, and one is killed each time."""
    random, output = np.random.default_rng(seed), tmp_path / "killed.hdf5"
    flags = flags_of(model_dir, output, {"input": long_corpus, "batch_tokens": 32})
    for wanted in (*sorted(random.integers(0, 40, 4)), None):
        machines = [torchrun(launcher, *MODULE, *flags) for launcher in two_machines(2)]
        while wanted is not None and num_parts(output) < wanted and all(each.poll() is None for each in machines):
            time.sleep(0.002)
        if wanted is not None:
            time.sleep(random.uniform(0, 0.1))
            everyone = with_children(machines)
            everyone[random.integers(len(everyone))].kill()
            _, others = psutil.wait_procs(everyone, timeout=15)
            for each in others:  # launchers wait for each other for a quarter of an hour
                each.kill()
        messages = [each.communicate(timeout=120)[1] for each in machines]
        if output.exists():
            break
    assert output.read_bytes() == of_one_process, messages
    assert num_parts(output) == 0


def test_processes_that_do_not_fit_together(tmp_path):
    main, other = (outputs.PartsFolder(tmp_path / "v.hdf5", {"weights": each}, 16) for each in (0, 1))
    with pytest.raises(ValueError, match="v.hdf5.parts has other settings: weights 0, now 1"):
        other.follow(main)
    other.settings = main.settings
    with pytest.raises(FileNotFoundError, match="v.hdf5: not all machines find .*parts. Pass a shared path"):
        other.follow(main)
    main.ends, other.ends = {0: 3, 3: 7}, {0: 3, 3: 6}
    with pytest.raises(ValueError, match="The processes read different lines"):
        main.compare([main, other])


# Several files


@pytest.mark.parametrize("suffix", [".hdf5", ".parquet"])
@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_several_files_and_their_places(model_dir, loaded, tmp_path, suffix, pooling):
    """The entries of the files follow each other; the output names file and line of each."""
    for name, lines in (("a.txt", ["the cat", "", "sat"]), ("b.txt", ["on"])):
        write_lines(tmp_path / name, lines)
    (tmp_path / "c.tsv").write_text("year\ttext\n1900\tthe mat\n")
    inputs = [str(tmp_path / name) for name in ("?.txt", "c.tsv")]
    path = tmp_path / f"v{suffix}"
    flags = flags_of(model_dir, path, {"layers": "top", "pooling": pooling})
    embed.main([*flags, "--input", *inputs])
    expected = [("a.txt", 1), ("a.txt", 2), ("a.txt", 3), ("b.txt", 1), ("c.tsv", 2)]
    expected = [(str(tmp_path / name), number) for name, number in expected]
    texts = ["the cat", "", "sat", "on", "the mat"]
    if suffix == ".parquet":
        table = read_table(path)
        assert table.column_names == ["file", "line", "text", "tokens", "vectors"] and table["text"][:] == texts
        assert list(zip(table["file"], table["line"], strict=True)) == expected
        found = [np.array(each) for each in table["vectors"]]
    else:
        with h5py.File(path) as file:
            assert list(zip(file["files"].asstr()[:], file["lines"][:].tolist(), strict=True)) == expected
            found = list(file["sentence_vectors"]) if pooling == "mean" else [file[str(n)][:] for n in range(5)]
    for vectors, text in zip(found, texts, strict=True):
        wanted = alone(loaded, text.split(), "top", pooling)
        np.testing.assert_allclose(vectors.reshape(wanted.shape), wanted, atol=1e-5)


def test_sentences_and_their_places(model_dir, tmp_path):
    pytest.importorskip("sentencex")
    write_lines(tmp_path / "a.txt", ["The cat sat", "on it. The", "mat is", "", "here. So"])
    path = run(model_dir, tmp_path / "v.hdf5", input=tmp_path / "a.txt", split_sentences="en")
    with h5py.File(path) as file:
        found = json.loads(file["sentence_to_index"][0])
        assert found == {"The cat sat on it.": "0", "The mat is": "1", "here.": "2", "So": "3"}
        assert file["lines"][:].tolist() == [1, 2, 5, 5] and {*file["files"].asstr()} == {str(tmp_path / "a.txt")}
        assert [file[str(number)].shape[1] for number in range(4)] == [5, 3, 1, 1]
    data = datasets.Dataset.from_dict({"text": ["One goes. Two", "Three."]})
    data.save_to_disk(tmp_path / "data")
    path = run(model_dir, tmp_path / "d.parquet", dataset=tmp_path / "data", split_sentences="en")
    table = read_table(path)
    assert table["text"][:] == ["One goes.", "Two", "Three."] and table["line"][:] == [0, 0, 1]
    assert table["file"][:] == [str(tmp_path / "data")] * 3


def test_fasta_files_with_equal_names(model_dir, tmp_path):
    for name, record in (("a.fasta", "x/1"), ("b.fa", "x_1")):
        write_lines(tmp_path / name, [f">{record}", "MK"])
    flags = flags_of(model_dir, tmp_path / "v.hdf5", {"layers": "top"})
    inputs = ["--input", str(tmp_path / "a.fasta"), str(tmp_path / "b.fa")]
    with pytest.raises(ValueError, match=r"b\.fa: .*a\.fasta has the name 'x_1' too \(/ is _\); change it"):
        embed.main([*flags, *inputs])
    write_lines(tmp_path / "b.fa", [">y", "M"])
    with h5py.File(embed.main([*flags, *inputs])) as file:
        assert {name: len(file[name]) for name in file} == {"x_1": 2, "y": 1}
    write_lines(tmp_path / "c.txt", ["the cat"])
    with pytest.raises(ValueError, match="FASTA files, whose records have names, and texts"):
        embed.main([*flags, *inputs, str(tmp_path / "c.txt")])


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--input FILE ... or --dataset NAME"),
        ({"input": "c.json.gz"}, "c.json.gz: text is read from .txt, and from .jsonl with a record per line"),
        ({"input": "c.docx"}, "c.docx: unknown suffix '.docx'; .* .txt, .jsonl.*.conllu, .fasta, .*.gz or .zst"),
        ({"input": "absent.txt"}, "absent.txt: no file found"),
        ({"input": "p.fasta", "raw_text": True}, "p.fasta has sequences.*--raw_text"),
        ({"input": "c.txt", "raw_text": True, "unit": "character"}, "--raw_text .* --unit character"),
        ({"input": "c.txt", "output": "v.npz"}, "v.npz: unknown suffix '.npz'; .* .hdf5, .h5, .parquet"),
        ({"input": "c.txt", "output": "c.hdf5"}, "--output c.hdf5 exists"),
        ({"input": "empty.txt"}, "empty.txt is empty"),
        ({"input": "number.jsonl"}, r"number.jsonl, line 1: the sentence is \['a', 1\]"),
    ],
)
def test_mistakes(model_dir, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    write_lines(Path("c.txt"), LINES)
    Path("c.hdf5").touch()
    Path("c.docx").touch()
    Path("c.json.gz").touch()
    Path("empty.txt").touch()
    write_lines(Path("p.fasta"), [">a", "M"])
    write_lines(Path("number.jsonl"), ['{"text": ["a", 1]}'])
    with pytest.raises((ValueError, OSError), match=message):
        run(model_dir, **{"output": "v.hdf5", **options})
    assert not list(tmp_path.glob("*.parts")) and not Path("v.hdf5").exists()


def test_an_untrained_mix_is_told(tmp_path, corpus, caplog):
    folder = save_model(tmp_path / "m", ELMoForPreTraining(tiny()))
    found = [read(run(folder, tmp_path / f"{name}.h5", input=corpus, layers=name)) for name in ("mixed", "average")]
    assert_close(*found)
    assert "was never trained: the vectors are the average of the layers" in caplog.text


def test_a_mix_that_normalizes_over_the_batch_gets_lines_alone(tmp_path, corpus, caplog):
    torch.manual_seed(0)
    model = ELMoModel(tiny(scalar_mix_layer_norm="allennlp")).eval()
    folder = save_model(tmp_path / "m", model)
    for number in range(2):  # two models, each with several batches
        caplog.clear()
        options = {"layers": "mixed", "batch_tokens": 8}
        found = read(run(folder, tmp_path / f"{number}.hdf5", input=corpus, **options))
        assert ["so each line is one" in message for message in caplog.messages].count(True) == 1
    tokenizer = ELMoTokenizer()
    with torch.no_grad():
        one = model(**tokenizer([LINES[0].split()], is_split_into_words=True, return_tensors="pt")).elmo_embeddings
    assert_close([found[0]], [one[0, 1:-1].numpy()])


def test_a_model_without_all_weights_is_refused(tmp_path, corpus):
    model = ELMoModel(tiny())
    weights = {name: tensor for name, tensor in model.state_dict().items() if "highways" not in name}
    model.save_pretrained(tmp_path / "half", state_dict=weights)
    with pytest.raises(ValueError, match=r"half lacks weights: char_encoder\.highways\.0\.carry\.bias, .*Convert or"):
        run(tmp_path / "half", tmp_path / "v.hdf5", input=corpus)
    for read in (load_pretrained, load_for_export):
        kind, place = ELMoForPreTraining, tmp_path / "half"
        with pytest.raises(ValueError, match=r"half lacks weights: elmo\.char_encoder\.highways\.0\.carry\.bias"):
            read(kind, place)


def test_missing_extras_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r'needs h5py: pip install "modeling-elmo\[convert\]"'):
        run("m", output="v.hdf5")


# States that run on


def one_after_the_other(loaded, sentences: list[list[str]]) -> list[np.ndarray]:
    """All layers of each sentence, where both directions read the sentences as one text, without states.

    The backward direction reads the last word of the next sentence after the first word of the one before.
    """
    model, tokenizer = loaded
    inputs = [tokenizer([each], is_split_into_words=True, return_tensors="pt") for each in sentences]
    lengths, halves = [each["input_ids"].shape[1] for each in inputs], []
    for order in (1, -1):
        characters = torch.cat([each["character_ids"] for each in inputs[::order]], dim=1)
        with torch.no_grad():
            layers = torch.stack(model(character_ids=characters).hidden_states)[:, 0]
        parts = layers.split(lengths[::order], dim=1)[::order]
        halves.append([part.chunk(2, dim=-1)[order < 0] for part in parts])
    return [torch.cat(pair, -1)[:, 1:-1].numpy() for pair in zip(*halves, strict=True)]


STREAM = [line.split() for line in ("one two", "a b c d", "", "x", "the play was staged", "they play", "y z", "last")]


@pytest.mark.parametrize("batch_size", [1, 3, 5, 64])
def test_states_run_on_from_batch_to_batch(batch_size, model_dir, loaded, tmp_path):
    """Also past a smaller batch; and a run that was interrupted continues them."""
    corpus = write_lines(tmp_path / "corpus.txt", list(map(" ".join, STREAM)))
    found = read(run(model_dir, tmp_path / "a.hdf5", input=corpus, stateful=True, batch_size=batch_size))
    expected = [None] * len(STREAM)
    for row in range(batch_size):
        for number, vectors in enumerate(
            one_after_the_other(loaded, STREAM[row::batch_size]) if row < len(STREAM) else ()
        ):
            expected[row + number * batch_size] = vectors
    assert_close(found, expected)


def test_an_interruption_keeps_the_states(model_dir, tmp_path, monkeypatch):
    corpus = write_lines(tmp_path / "corpus.txt", list(map(" ".join, STREAM)))
    options = {"input": corpus, "stateful": True, "batch_size": 2}
    whole = run(model_dir, tmp_path / "whole.hdf5", **options).read_bytes()
    computed, blocks = embed.embed_block, []

    def stopped(lines, *arguments, **others):
        blocks.append(lines)
        if len(blocks) == 3:
            raise KeyboardInterrupt
        return computed(lines, *arguments, **others)

    monkeypatch.setattr(embed, "embed_block", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(model_dir, tmp_path / "a.hdf5", **options)
    assert run(model_dir, tmp_path / "a.hdf5", **options).read_bytes() == whole
    assert [len(lines) for lines in blocks] == [2] * 5  # two before, the one that was stopped, two after


def test_files_of_allennlps_embedder(tmp_path):
    """Its `ElmoEmbedder` wrote ten batches of three sentences."""
    folder = ROOT / "tests" / "fixtures" / "elmo_fixtures" / "allennlp"
    model = convert_checkpoint(
        OriginalCheckpoint,
        folder / "lm_weights.hdf5",
        tmp_path / "model",
        "whitespace",
        options=folder / "options.json",
    )
    lists = json.loads((folder / "sentences.json").read_text())
    corpus = write_lines(
        tmp_path / "corpus.txt", [sentence for batch in zip(*lists, strict=True) for sentence in batch]
    )
    options = {"input": corpus, "layers": "top"}
    stateful, stateless = (
        read(run(model, tmp_path / f"{name}.hdf5", **options, **more))
        for name, more in (("on", {"stateful": True, "batch_size": 3}), ("off", {}))
    )
    expected = []
    for batch in range(10):
        for number in range(3):
            with h5py.File(folder / f"lm_embeddings_{number}.hdf5") as file:
                expected.append(np.concatenate(file[str(batch)][()], -1))
    errors = [np.abs(found - wanted).max() for found, wanted in zip(stateful, expected, strict=True)]
    assert max(errors) < TOLERANCE, errors
    assert min(np.abs(found - wanted).max() for found, wanted in zip(stateless[3:], expected[3:], strict=True)) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stateful": True, "batch_size": 0}, "--batch_size 0: pass a number above 0"),
        ({"batch_size": 3}, "--batch_size 3 needs --stateful; without it, pass --batch_tokens"),
    ],
)
def test_sizes_of_batches_that_are_refused(options, message, model_dir, corpus, tmp_path, capsys):
    with pytest.raises((ValueError, SystemExit)) as error:
        run(model_dir, tmp_path / "a.hdf5", input=corpus, **options)
    assert message in str(error.value) + capsys.readouterr().err
