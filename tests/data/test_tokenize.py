"""Tokenization loses nothing, repeats exactly, and tells which input is wrong."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import ray.data
from tokenizers import Tokenizer

from rayzero3.data import documents
from rayzero3.data.manifest import MANIFEST, TOKENIZER, Manifest, check_shards
from rayzero3.data.tokenize import _hash_file, _write_shard, tokenize
from rayzero3.errors import DataError
from tests.data.test_tokenizer import END, TEMPLATES, TEXT, make_tokenizer

pytestmark = pytest.mark.usefixtures("ray_cluster")

TEXTS = [f"Document {number}: naïve café <|endoftext|> \n\tline two of {number * 7919}" * (1 + number % 5) for number in range(60)]


@pytest.fixture
def small_shards(monkeypatch):
    """Make several shards of little text."""
    monkeypatch.setattr(documents, "SMALLEST_SHARD_BYTES", 1500)


def decoded(out):
    """Split -> texts, and that every document ends with the end token and holds it nowhere else."""
    manifest, model = Manifest.load(out), Tokenizer.from_file(str(out / TOKENIZER))
    found = {}
    for split, shards in manifest.splits.items():
        rows = [row.as_py() for shard in shards for row in pq.read_table(out / shard.file).column("tokens")]
        assert all(row.index(manifest.eod_id) == len(row) - 1 for row in rows)
        found[split] = [model.decode(row[:-1], skip_special_tokens=False) for row in rows]
    return found


def content(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_text_files_come_back_whole_and_a_second_run_keeps_them(tmp_path, small_shards):
    source = tmp_path / "source"
    for number, text in enumerate(TEXTS):
        (source / f"d{number % 3}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 3}" / f"{number}.txt").write_text(text)
    (source / "skip.txt").write_bytes(b"\xff\xfe\x00binary")
    (source / "empty.txt").write_text("")
    (source / "other.md").write_text("not matched")
    told = []
    manifest = tokenize([source], tmp_path / "out", vocab_size=300, validation_fraction=0.2, tell=told.append)
    assert len(manifest.splits["train"]) > 2 and manifest.skipped == ("skip.txt",)
    texts = decoded(tmp_path / "out")
    assert sorted(texts["train"] + texts["validation"]) == sorted(TEXTS)
    assert 2 <= len(texts["validation"]) <= 25
    check_shards(tmp_path / "out", manifest)
    before = content(tmp_path / "out")
    tokenize([source], tmp_path / "out", vocab_size=300, validation_fraction=0.2, tell=told.append)
    assert "already" in told[-1] and content(tmp_path / "out") == before
    (source / "d0" / "0.txt").write_text("changed")
    tokenize([source], tmp_path / "out", vocab_size=300, validation_fraction=0.2, tell=told.append)
    assert "changed" in sum(decoded(tmp_path / "out").values(), [])


def test_the_same_inputs_give_the_same_bytes_wherever_they_lie_and_on_any_number_of_cpus(tmp_path, small_shards, monkeypatch):
    options = ray.data.DataContext.get_current().execution_options
    for place, cpus in (("a", 1), ("b", 4)):
        monkeypatch.setattr(options, "resource_limits", ray.data.ExecutionResources(cpu=cpus))
        folder = tmp_path / place
        folder.mkdir()
        for number in range(60) if place == "a" else reversed(range(60)):
            (folder / f"{number}.txt").write_text(TEXTS[number])
        tokenize([folder], tmp_path / f"out-{place}", vocab_size=280)
    assert content(tmp_path / "out-a") == content(tmp_path / "out-b")


def test_jsonl_is_cut_into_ranges_without_losing_a_line(tmp_path, small_shards):
    lines = [json.dumps({"body": text}) for text in TEXTS]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:30], "", *lines[30:]]))
    tokenizer = tmp_path / "plain" / TOKENIZER
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number:02d}.txt").write_text(text)
    tokenize([tmp_path / "text"], tmp_path / "plain", vocab_size=300)
    manifest = tokenize([tmp_path / "in.jsonl"], tmp_path / "out", tokenizer=tokenizer, text_key="body", validation_fraction=0)
    assert len(manifest.splits["train"]) > 2 and not manifest.splits["validation"]
    assert decoded(tmp_path / "out")["train"] == TEXTS


def test_a_file_that_may_not_be_read_is_skipped_and_named(shards, tmp_path, monkeypatch):
    """Without Ray: whoever runs the tests may be allowed to read everything."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    (tmp_path / TOKENIZER).write_bytes((shards / TOKENIZER).read_bytes())
    unit = {"path": str(tmp_path / "a.txt"), "name": "a.txt", "start": 0, "stop": 5}
    monkeypatch.setattr(documents.Path, "read_bytes", refuse)
    written = _write_shard({"index": 0, "units": [unit]}, str(tmp_path), 0, "uint16", 0.0, "text")
    assert written == {"skipped": ["a.txt"], "train": [], "validation": []}
    monkeypatch.setattr("builtins.open", refuse)
    assert _hash_file(unit) == "not readable"


def test_documents_begin_as_the_tokenizer_says_and_one_that_will_not_do_costs_no_shards(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    make_tokenizer(tmp_path / "tokenizer.json", TEMPLATES["Llama's"])
    manifest = tokenize([tmp_path], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", validation_fraction=0.0)
    (row,) = (row.as_py() for row in pq.read_table(tmp_path / "out" / manifest.splits["train"][0].file).column("tokens"))
    assert row[0] == 0 and row[-1] == manifest.eod_id == 1
    assert Tokenizer.from_file(str(tmp_path / "out" / TOKENIZER)).decode(row[1:-1]) == TEXT
    before = content(tmp_path / "out")
    make_tokenizer(tmp_path / "other.json", None)
    endless = (tmp_path / "other.json").read_text().replace(END, "</end>")
    for text, message in [("{}", "not readable"), (endless, "has no token that ends a document")]:
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError, match=message):
            tokenize([tmp_path], tmp_path / "out", tokenizer=tmp_path / "other.json")
    assert content(tmp_path / "out") == before


def test_copies_of_a_document_are_never_split(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"the same {number % 4}")
    tokenize([tmp_path], tmp_path / "out", vocab_size=260, validation_fraction=0.5)
    texts = decoded(tmp_path / "out")
    assert not set(texts["train"]) & set(texts["validation"])


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"text": ', r"line 3 of .*in.jsonl"), ('{"other": "x"}', r"line 3 of .*in.jsonl; it has no key 'text'"), ('{"text": 5}', "'text' is no text"), ("[1]", "line 3")],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n\n' + line + '\n{"text": "good"}\n')
    with pytest.raises(DataError, match=message):
        tokenize([tmp_path / "in.jsonl"], tmp_path / "out", vocab_size=300)
    assert not (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "either a tokenizer file or a vocabulary size"),
        ({"vocab_size": 100}, "vocabulary size is 100; expected at least 257"),
        ({"validation_fraction": 1.0}, "validation fraction is 1.0"),
        ({"pattern": "*.nothing"}, r"files that match \*.nothing is none"),
        ({"inputs": ["nowhere"]}, "the input nowhere is missing"),
        ({"vocab_size": None, "tokenizer": "nowhere.json"}, "tokenizer nowhere.json is missing"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path, changes, message):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=message):
        tokenize(**({"inputs": [tmp_path], "out": tmp_path / "out", "vocab_size": 300} | changes))
