"""`elmo explore`: what it shows against the models themselves, the page through its API, what it does not serve."""

import math
import re
import runpy
import socket
import sys
import threading
import time
from dataclasses import replace
from html import unescape
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
import yaml
from bilm_models import save
from sklearn.decomposition import PCA
from transformers import pipeline

from modeling_elmo import (
    ELMoConfig,
    ELMoForCoreferenceResolution,
    ELMoForPreTraining,
    ELMoForQuestionAnswering,
    ELMoForSemanticRoleLabeling,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoTokenizer,
)
from modeling_elmo.run_scripts import explore
from modeling_elmo.run_scripts.explorer import readings
from modeling_elmo.run_scripts.pretraining.corpus import Corpus

ROOT = Path(__file__).parents[1]
ENGLISH, KOREAN = (str(ROOT / "model_cards" / f"elmo-small-{language}") for language in ("en", "ko"))
PLAY = ROOT / "tests" / "fixtures" / "demo" / "play.txt"
TEXT = "The play was a success.\n\n  They play chess. \nA play, then."
LINES = ["The play was a success.", "They play chess.", "A play, then."]
STORY = "Ada wrote it, in 1843.\nShe knew Mr. Babbage."
HEADS = {
    "tagger": (ELMoForTokenClassification, {"id2label": dict(enumerate(["O", "B-X", "I-X"]))}),
    "parts-of-speech": (ELMoForTokenClassification, {"id2label": dict(enumerate(["NOUN", "VERB"])), "head": "linear"}),
    "labeler": (
        ELMoForSemanticRoleLabeling,
        {"id2label": dict(enumerate(["O", "B-V", "B-ARG0", "I-ARG0"])), "task_num_layers": 2},
    ),
    "reader": (ELMoForQuestionAnswering, {}),
    "classifier": (ELMoForSequenceClassification, {"id2label": dict(enumerate(["bad", "good", "odd"]))}),
    "comparer": (ELMoForSequenceClassification, {"classifier": "esim"}),
    "resolver": (ELMoForCoreferenceResolution, {"max_span_width": 3, "train_singletons": True}),
}


@pytest.fixture(scope="module")
def english() -> readings.OpenModel:
    return readings.open_model(ENGLISH)


@pytest.fixture(scope="module")
def plain_english():
    return ELMoForPreTraining.from_pretrained(ENGLISH).eval(), ELMoTokenizer.from_pretrained(ENGLISH)


@pytest.fixture(scope="module")
def page():
    return pytest.importorskip("modeling_elmo.run_scripts.explorer.page", exc_type=ImportError)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("corpus") / "play.txt"
    file.write_text("".join(PLAY.read_text(encoding="utf-8").splitlines(keepends=True)[:25]), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def head_folders(tmp_path_factory) -> dict[str, Path]:
    """Small random heads of every task."""
    root = tmp_path_factory.mktemp("heads")
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>"])
    for name, (cls, options) in HEADS.items():
        torch.manual_seed(0)
        config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), task_hidden_size=6, **options)
        model = cls(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if not key.startswith("elmo."):
                    parameter.normal_(std=0.3 if name == "resolver" else 0.7)
        save(root / name, model, tokenizer)
    return {name: root / name for name in HEADS}


@torch.no_grad()
def layers_of(model, tokenizer, text: str | list[str]) -> torch.Tensor:
    """Shape: `(layers, words, dim)`, of a text by itself."""
    given = {"is_split_into_words": not isinstance(text, str)}
    output = getattr(model, "elmo", model)(**tokenizer([text], return_tensors="pt", **given))
    return torch.stack(output.hidden_states)[:, 0, 1:-1]


def test_cosines_are_those_of_the_model(english, plain_english):
    expected = [layers_of(*plain_english, line) for line in LINES]
    found = readings.layer_cosines(english, TEXT, "play (2)")
    chosen = expected[1][:, 1]
    assert [words for words, _ in found] == [line.replace(".", " .").replace(",", " ,").split() for line in LINES]
    for (_, cosines), layers in zip(found, expected, strict=True):
        wanted = torch.cosine_similarity(layers, chosen[:, None], dim=-1)
        np.testing.assert_allclose(cosines, wanted, atol=1e-5)
    assert found[1][1][:, 1] == pytest.approx(1, abs=1e-5) and found[0][1][0, 1] == pytest.approx(1, abs=1e-5)
    assert found[0][1][2, 1] < 0.9  # in the top layer, a play on a stage is not what chess players do


def test_words_have_names(english):
    names, first = readings.words_to_choose(english, TEXT)
    wanted = "The|play|was|a|success|.|They|play (2)|chess|. (2)|A|play (3)|,|then|. (3)"
    assert "|".join(names) == wanted and first == "play"  # as frequent as the full stop, and longer


def test_nearest_uses_are_those_of_plain_cosines(english, plain_english, corpus):
    found = readings.similar_uses(english, TEXT, "play (2)", 1, Corpus.from_files([corpus]))
    assert found.query == 1 and len(found.uses) > 25 and len(found.nearest) == readings.SHOWN_USES
    assert {use.words[use.position].lower() for use in found.uses} == {"play"}
    vectors = torch.stack([layers_of(*plain_english, list(use.words))[1, use.position] for use in found.uses]).numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors[1]
    order = [row for row in np.argsort(-cosines, kind="stable") if found.uses[row].words is not found.uses[1].words]
    wanted = cosines[order[: readings.SHOWN_USES]]
    np.testing.assert_allclose([cosine for _, cosine in found.nearest], wanted, atol=1e-4)
    np.testing.assert_allclose(cosines[[near for near, _ in found.nearest]], wanted, atol=1e-4)
    plane = PCA(2).fit(vectors)
    np.testing.assert_allclose(found.shares, plane.explained_variance_ratio_, atol=1e-4)
    np.testing.assert_allclose(np.abs(found.points), np.abs(plane.transform(vectors)), atol=1e-3)  # up to their signs


@torch.no_grad()
def test_expectations_are_those_of_the_softmax(english, plain_english):
    """The top layer's two halves, through torch's adaptive softmax, shifted by hand."""
    model, tokenizer = plain_english
    found = readings.expectations(english, TEXT)
    assert [[each.word for each in line] for line in found] == [tokenizer.splitter.words(line) for line in LINES]
    for line, row in zip(LINES, found, strict=True):
        encoding = tokenizer([line], return_tensors="pt")
        forward, backward = model.elmo(**encoding).last_hidden_state[0].chunk(2, dim=-1)
        ways = []
        for hidden in (forward[:-2], backward[2:]):  # the state before each word, and the state after it
            ways.append(F.pad(model.softmax.adaptive.log_prob(hidden), (1, 0), value=-torch.inf))  # no <PAD>
        ids = encoding["input_ids"][0, 1:-1, None]
        for log_probs, shown in zip(ways, ("forward_bits", "backward_bits"), strict=True):
            bits = [getattr(each, shown) for each in row]
            np.testing.assert_allclose(bits, -log_probs.gather(1, ids)[:, 0] / math.log(2), atol=1e-3)
        ways.append((ways[0] + ways[1]).log_softmax(-1))
        for log_probs, shown in zip(ways, ("forward", "backward", "both"), strict=True):
            values, words = log_probs.topk(readings.SHOWN_PREDICTIONS)
            guesses = [getattr(each, shown) for each in row]
            np.testing.assert_allclose([[guess.log_prob for guess in each] for each in guesses], values, atol=1e-3)
            assert [[guess.word for guess in each] for each in guesses] == [
                tokenizer.convert_ids_to_tokens(each.tolist()) for each in words
            ]
    assert [each.token for each in readings.expectations(english, "It won’t “ xyzzyq —")[0]] == [
        *("It", "wo", "n't", '"', "<UNK>", "--")
    ]


def test_a_word_in_other_signs_is_known_and_found_among_the_guesses(english, page):
    shown = re.sub("[\u2068\u2069]", "", page.expectation_lines(english, "She said , “ I do n’t know xyzzyq . ”"))
    assert "n’t</td>" in shown and "[n&#x27;t]" in shown and "xyzzyq*" in shown and "n’t*" not in shown
    assert page.language_of(english, ["“ — … ”", "It xyzzyq", "xyzzyq"]) == "“ — … ”"


def test_entities(head_folders):
    opened = readings.open_model(str(head_folders["tagger"]))
    found = readings.head_pieces(opened, STORY)
    assert "".join(text for text, _ in found) == STORY
    stock = pipeline("token-classification", opened.model, tokenizer=opened.tokenizer, aggregation_strategy="simple")
    entities = [(each["word"], each["entity_group"]) for line in STORY.split("\n") for each in stock(line)]
    spans = [(text.replace(" ", ""), label) for text, label in found if label]
    assert spans and spans == [(word.replace(" ", ""), label) for word, label in entities]
    opened = readings.open_model(str(head_folders["parts-of-speech"]))  # whose words stay apart
    labeled = [text for text, label in readings.head_pieces(opened, STORY) if label]
    assert labeled == opened.tokenizer.splitter.words(STORY)


def test_roles(head_folders):
    opened = readings.open_model(str(head_folders["labeler"]))
    found = readings.head_pieces(opened, STORY)
    label = pipeline("semantic-role-labeling", opened.model, tokenizer=opened.tokenizer)
    wanted = []
    for line in STORY.split("\n"):
        wanted += [verb["description"] for verb in label(line)["verbs"]] or [f"{line} (no predicate)"]
    shown = "".join(text if role is None else f"[{role}: {text.strip()}] " for text, role in found)
    assert [line.strip() for line in shown.strip().split("\n")] == wanted and "[V: " in shown
    with pytest.raises(ValueError, match="A line has 101 words.* up to 100"):  # each may be a predicate
        readings.head_pieces(opened, "It rained.\n" + "word " * 101)


def test_answers(head_folders):
    opened = readings.open_model(str(head_folders["reader"]))
    found = readings.head_pieces(opened, STORY, question="Who wrote\nit?")
    ask = pipeline("extractive-question-answering", opened.model, tokenizer=opened.tokenizer)
    answer = ask(question="Who wrote it?", context=STORY)
    assert "".join(text for text, _ in found) == STORY
    assert [(text, label) for text, label in found if label] == [(answer["answer"], f"{answer['score']:.0%}")]


def test_classes(head_folders):
    opened = readings.open_model(str(head_folders["classifier"]))
    for second in (" ", "It rained."):
        found = readings.head_pieces(opened, STORY, second=second)
        wanted = []
        for line in STORY.split("\n"):
            inputs = opened.tokenizer(*([line], [second]) if second.strip() else [line], return_tensors="pt")
            with torch.no_grad():
                shares = opened.model(**inputs).logits.reshape(-1).softmax(0)
            best = shares.argmax().item()
            wanted.append((line, f"{opened.model.config.id2label[best]} {shares[best]:.0%}"))
        assert found == [wanted[0], ("\n", None), wanted[1]]


def test_clusters(head_folders):
    opened = readings.open_model(str(head_folders["resolver"]))
    resolve = pipeline("coreference-resolution", opened.model, tokenizer=opened.tokenizer)
    clusters = resolve(STORY.split("\n"))["clusters"]
    spans = [(each["start"], each["end"], str(n)) for n, mentions in enumerate(clusters, 1) for each in mentions]
    assert clusters and readings.head_pieces(opened, STORY) == readings.pieces(STORY, spans)


def test_pieces_of_nested_spans():
    text = "the wife of Emma's brother left"
    spans = [(0, 26, "1"), (12, 26, "2"), (12, 18, "3")]
    assert readings.pieces(text, spans) == [
        ("the wife of ", "1"),
        ("Emma's", "3"),
        (" brother", "2"),
        (" left", None),
    ]
    assert readings.pieces("", []) == [] and readings.pieces("ab", [(0, 1, "X"), (1, 2, "X")]) == [
        ("a", "X"),
        ("b", "X"),
    ]


def test_other_mistakes(english, head_folders, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="elmo-small-en .*'chess'"):
        readings.layer_cosines(english, "A play.", "chess")
    (tmp_path / "config.json").write_text('{"model_type": "elmo", "architectures": ["BertModel"]}')
    with pytest.raises(ValueError, match="BertModel.*ELMoForPreTraining"):
        readings.open_model(str(tmp_path))
    for module, received in (("gradio", r"modeling-elmo\[explore\]"), (f"{readings.__package__}.page", "page halted")):
        with monkeypatch.context() as patch, pytest.raises(ImportError, match=received):
            patch.setitem(sys.modules, module, None)
            explore.main([ENGLISH])


def test_texts_are_escaped(english, page):
    whole = ELMoTokenizer.from_pretrained(ENGLISH, pre_tokenization="whitespace")  # keeps a tag in one word
    opened, evil = replace(english, tokenizer=whole), '<img/src="x"/onerror=alert(1)>'
    text = f"{evil} here\nand {evil} there"
    names = readings.named_words(opened, text)
    for shown in (
        page.cosine_lines(opened.layers, readings.layer_cosines(opened, text, evil), names, evil),
        page.note(evil),
        page.model_line(replace(opened, name=evil)),
        page.uses_of(opened, text, evil, 2, None)[1],
        page.expectation_lines(opened, text),
        page.folded([([evil], "")] * (page.OPEN_LINES + 1)),
        marked(page, opened, [(evil, None)]),
        marked(page, opened, [("a", evil)]),
    ):
        assert "<img" not in shown and "&lt;img/src=&quot;x&quot;/onerror" in shown


def test_a_long_text_is_folded(page):
    lines = [(["line", str(number)], f"part {number};") for number in range(60)]
    closed = re.findall(r"<details><summary>line (\d+)</summary>part (\d+);</details>", page.folded(lines, 40))
    assert closed == [(str(n), str(n)) for n in range(page.OPEN_LINES, 60) if n != 40]


def test_what_heads_find_is_counted(english, page):
    assert "Nothing found." in marked(page, english, [("She left.", None)])
    found = marked(page, english, [("She", "A"), (" met ", None), ("him", "B"), ("her", "A")])
    assert "Labeled pieces: 3." in found
    first, second, third = re.findall(r'<mark style="(.*?)">', found)
    assert first == third != second


def marked(page, opened, pieces) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readings, "head_pieces", lambda *_: pieces)
        return page.marked_text(opened)


@pytest.fixture(scope="module")
def served(head_folders, corpus):
    """The page of the program, with a biLM of each language and three heads, and a client of its API."""
    gradio = pytest.importorskip("gradio")
    client = pytest.importorskip("gradio_client")
    pages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradio.Blocks, "block_thread", lambda page: pages.append(page))  # it would wait for Ctrl-C
        patch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")  # the page stays on this computer all the same
        heads = [str(head_folders[name]) for name in ("tagger", "reader", "classifier")]
        explore.main([ENGLISH, KOREAN, *heads, "--corpus", corpus])
    (page,) = pages
    yield page, client.Client(page.local_url, verbose=False, analytics_enabled=False)
    page.close()


def test_the_page_answers_as_the_readings(served, english, corpus):
    page, client = served
    assert tabs_of(page) == ["Uses of a word", "What the model expects", "Heads", "Layer weights"]
    chosen, *first = client.predict(TEXT, 2, api_name="/words")
    assert chosen["value"] == "play" and 'data-word="play" aria-pressed="true"' in first[0]
    cosines, table, points, caption, *korean = client.predict(TEXT, "play (2)", 2, api_name="/uses")
    found = readings.similar_uses(english, TEXT, "play (2)", 2, Corpus.from_files([corpus]))
    wanted = readings.layer_cosines(english, TEXT, "play (2)")
    shown = re.findall(r">(-?\d\.\d\d)</span>", cosines)
    assert shown == [f"{each:.2f}" for _, line in wanted for each in line.T.flatten()]
    assert re.findall(r"<td[^>]*>(-?\d\.\d\d)</td>", table) == [f"{cosine:.2f}" for _, cosine in found.nearest]
    assert f"Uses of the word: {len(found.uses)}; " in cosines and "play" in korean[0] and points["visible"]
    assert [f"{share:.0%}" for share in found.shares] == re.findall(r"\d+%", caption)
    expected = client.predict("They play chess.", api_name="/expectations")
    (line,) = readings.expectations(english, "They play chess.")
    assert f"{np.mean([word.forward_bits for word in line]):.1f} bits given the words before" in expected
    entities = client.predict(STORY, "", "", api_name="/head_1")
    text = re.sub(r"<bdi>.*?</bdi>|<[^>]*>", "", entities.partition('class="elmo-text">')[2])
    assert unescape(text) == STORY and entities.count("<mark") > 1


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("LocalHost:7860", True), ("[::1]:7860", True), ("127.0.0.1.evil.example:7860", False)]
    + [("evil.localhost", False), ("0.0.0.0", False), ("", False)],
)
def test_the_page_is_served_under_local_names_only(served, host, is_local):
    """Otherwise a page of another site, whose name leads to this computer, could read the corpus."""
    for path in ("", "nothing", "gradio_api/info", "gradio_api/queue/data"):
        with httpx.stream("GET", f"{served[0].local_url}{path}", headers={"Host": host}) as answer:
            assert (answer.status_code == 400) != is_local, path
    answer = httpx.post(f"{served[0].local_url}gradio_api/queue/join", headers={"Host": host})
    assert (answer.text == "Invalid host header") != is_local


def test_a_space_is_served_under_its_names(monkeypatch):
    pytest.importorskip("gradio")
    monkeypatch.setenv("SYSTEM", "spaces")
    monkeypatch.setenv("SPACE_ID", "user/explorer")
    spec = find_spec("modeling_elmo.run_scripts.explorer.page")
    page = module_from_spec(spec)  # a new one: the variables are read when it is imported
    spec.loader.exec_module(page)
    assert "*" in page.LAUNCH_OPTIONS["app_kwargs"]["middleware"][0].kwargs["allowed_hosts"]


def test_the_models_answer_one_question_at_a_time(served, monkeypatch):
    page, client = served
    busy, read = threading.Lock(), readings.lines_of

    def read_slowly(*inputs):
        assert busy.acquire(blocking=False), "two questions at a time"
        time.sleep(0.1)
        busy.release()
        return read(*inputs)

    monkeypatch.setattr(readings, "lines_of", read_slowly)
    asked = (("/words", TEXT, 2), ("/expectations", TEXT), ("/head_1", TEXT, "", ""), ("/head_3", TEXT, "", "")) * 2
    jobs = [client.submit(*inputs, api_name=name) for name, *inputs in asked]
    assert all(job.result() for job in jobs)
    for path in ("run/words", "api/words"):  # these would pass the queue
        answer = httpx.post(f"{page.local_url}gradio_api/{path}", json={"data": [TEXT], "fn_index": 0})
        assert answer.status_code == 404 and "join the queue" in answer.text


def test_errors_of_the_page_are_messages(served, capfd):
    _, client = served
    for arguments, name, received in (
        (["", 2], "/words", "no text"),
        (["a " * 1500], "/expectations", "3,000 .*2,000"),
        ([STORY, None, None], "/head_2", "no question"),
        ([TEXT, "play", None], "/uses", "No word or no layer"),
        ([TEXT, "gioca", 2], "/uses", "reads no word &#x27;gioca&#x27;"),
    ):
        shown = client.predict(*arguments, api_name=name)
        message = shown if isinstance(shown, str) else "".join(filter(lambda part: isinstance(part, str), shown))
        assert re.search(f'class="elmo-note">.*{received}', message), name
        assert "<div" not in message.partition("elmo-small-ko")[0]  # the old result goes
    assert "Traceback" not in capfd.readouterr().err  # the terminal of the server


def test_the_page_is_served_on_this_computer_only_and_no_file_is(served, corpus):
    page, _ = served
    port = int(page.local_url.rstrip("/").rpartition(":")[2])
    listening = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == port}
    assert listening == {"127.0.0.1"} and page.share_url is None
    for path in ("/etc/hostname", corpus, f"{ENGLISH}/config.json", "../README.md"):
        answer = httpx.get(f"{page.local_url}gradio_api/file={path}")
        assert answer.status_code in (403, 404), path
    answer = httpx.post(f"{page.local_url}gradio_api/upload", files={"files": ("a.txt", b"a")})
    assert answer.status_code == 413
    assert httpx.get(page.local_url).status_code == 200  # the page itself is there
    assert not page.analytics_enabled and not page.run_history


def tabs_of(page) -> list[str]:
    return [each.label for each in page.blocks.values() if type(each).__name__ == "Tab"]


def test_a_page_opens_without_errors(head_folders, monkeypatch):
    """The components' first values are what the browser sends; a proxy that no one answers is not asked."""
    client = pytest.importorskip("gradio_client")
    from modeling_elmo.run_scripts.explorer.page import LAUNCH_OPTIONS, build_page

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    page = build_page(list(map(str, head_folders.values())))
    assert tabs_of(page) == ["Heads", "Layer weights"]
    page.launch(**LAUNCH_OPTIONS, prevent_thread_lock=True, quiet=True)
    sent = [each["props"].get("value") for each in page.get_config_file()["components"] if each["type"] == "textbox"]
    browser = client.Client(page.local_url, verbose=False, analytics_enabled=False)
    for number in range(len(head_folders)):
        assert browser.predict(*sent, api_name=f"/head_{number + 1}")
    shown = browser.predict(*sent[:2], None, api_name=f"/head_{1 + [*head_folders].index('comparer')}")
    assert "There is no second text yet" in shown
    page.close()


@pytest.mark.parametrize("name, answered", [("127.0.0.2", [200, 200, 400]), ("0.0.0.0", [200, 200, 200])])
def test_the_page_under_a_name_that_others_reach(name, answered, monkeypatch, capsys):
    gradio = pytest.importorskip("gradio")
    statuses = []

    def ask(page):
        port = page.server_port
        for host in ("localhost", "127.0.0.2", "elsewhere.example"):
            statuses.append(httpx.get(f"http://{name}:{port}/config", headers={"Host": f"{host}:{port}"}).status_code)
        page.close()

    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(gradio.Blocks, "block_thread", ask)
    explore.main([ENGLISH, "--server_name", name])
    assert statuses == answered and "Open http://" in capsys.readouterr().out


def test_a_space_runs(tmp_path, monkeypatch, capsys, corpus):
    gradio = pytest.importorskip("gradio")
    folder = tmp_path / "space"
    explore.main([ENGLISH, "--corpus", corpus, "--space", str(folder)])
    assert f"hf upload USER/NAME {folder} --repo-type space" in capsys.readouterr().out
    head = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert head["sdk"] == "gradio" and head["sdk_version"] == gradio.__version__ and head["app_file"] == "app.py"
    assert (folder / "requirements.txt").read_text().startswith("modeling-elmo[explore")
    copied = {path.name for path in (folder / "elmo-small-en").iterdir() if path.suffix != ".py"}
    others = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert copied == {"README.md", *others}
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(folder / "app.py"))
    assert tabs_of(names["demo"]) == ["Uses of a word", "What the model expects"]
    _, url, _ = names["demo"].launch(**names["LAUNCH_OPTIONS"], prevent_thread_lock=True, quiet=True)
    assert "ELMo explorer" in httpx.get(url).text
    names["demo"].close()
    with pytest.raises(FileExistsError, match="is not empty; pass a new or an empty folder"):
        explore.main([ENGLISH, "--space", str(folder)])


def test_an_address_that_cannot_be_opened():
    with socket.create_server((explore.LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        for name, number in ((explore.LOCAL, port), (explore.LOCAL, 70000), ("192.0.2.1", None), ("a" * 70, None)):
            with pytest.raises(ValueError, match=f"--server_name {name}, --port {number} cannot be opened"):
                explore.ExploreArguments(server_name=name, port=number)


def test_a_space_of_models_on_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("gradio")
    monkeypatch.setattr(explore, "check_model", lambda name: None)
    explore.write_space(tmp_path, ["user/elmo", KOREAN], trust_remote_code=True)
    app = (tmp_path / "app.py").read_text(encoding="utf-8")
    assert "models=['user/elmo', str(HERE / 'elmo-small-ko')]" in app and "trust_remote_code=True" in app
    head = yaml.safe_load((tmp_path / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert head["models"] == ["user/elmo"]
    other = tmp_path / "copies" / "elmo-small-ko"
    other.mkdir(parents=True)
    with pytest.raises(ValueError, match="Two models or texts have the name elmo-small-ko, "):
        explore.write_space(tmp_path / "other", [KOREAN, str(other)])
    (tmp_path / "texts").mkdir()
    for name in ("app.py", "README.md", "requirements.txt"):
        (tmp_path / "texts" / name).write_text("We play .\n")
        with pytest.raises(ValueError, match=f"{name}, or it is of a file of the Space. Rename one"):
            explore.write_space(tmp_path / "other", [KOREAN], [str(tmp_path / "texts" / name)])
