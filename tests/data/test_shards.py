"""Shards are what their manifest says, or training does not begin: the error names file, row and value."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayzero3.data.manifest import MANIFEST, TOKENIZER, Manifest, check_shards
from rayzero3.data.pack import packing_index
from rayzero3.data.reader import NO_TOKEN, WindowReader
from rayzero3.errors import DataError

SHARD = "train-00000.parquet"


@pytest.fixture
def folder(shards, tmp_path):
    return shutil.copytree(shards, tmp_path / "shards")


def rewrite(folder, change):
    """Write a shard anew, row group by row group, after `change(list of documents)` of the first one."""
    path = folder / SHARD
    with pq.ParquetFile(path) as file:
        groups, schema = [file.read_row_group(index) for index in range(file.num_row_groups)], file.schema_arrow
    documents = change([np.array(row.as_py()) for row in groups[0].column("tokens")])
    lengths = pa.array([len(document) for document in documents], pa.int64())
    groups[0] = pa.table({"tokens": pa.array(documents, schema.field("tokens").type), "length": lengths}, schema=schema)
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for group in groups:
            writer.write_table(group)


def with_foreign_token(folder):
    def change(documents):
        documents[2][5] = 60000
        return documents

    rewrite(folder, change)
    return r"a token in row 2 of .*train-00000.parquet is 60000; the vocabulary has 300"


def with_cut_file(folder):
    os.truncate(folder / SHARD, os.path.getsize(folder / SHARD) - 50)
    return r"train-00000.parquet is not a whole Parquet file"


def with_lost_file(folder):
    (folder / SHARD).unlink()
    return r"train-00000.parquet is missing; the manifest lists it"


def with_empty_shard(folder):
    table = pq.read_table(folder / SHARD)
    pq.write_table(table.slice(0, 0), folder / SHARD, use_dictionary=False)
    return r"number of documents in .*train-00000.parquet is 0"


def with_fewer_documents(folder):
    rewrite(folder, lambda documents: documents[:-1])
    return r"number of documents in .*train-00000.parquet is \d+; the manifest says"


def with_fewer_tokens(folder):
    rewrite(folder, lambda documents: [documents[0][:-1], *documents[1:]])
    return r"row group 0 of .*train-00000.parquet is \d+ tokens; the manifest says"


def with_other_dtype(folder):
    table = pq.read_table(folder / SHARD)
    wide = table.column("tokens").cast(pa.list_(pa.uint32()))
    pq.write_table(table.set_column(0, "tokens", wide), folder / SHARD, use_dictionary=False)
    return r"column tokens of .* is list<.*uint32>; the manifest says list<uint16>"


def with_other_tokenizer(folder):
    (folder / TOKENIZER).write_text("{}")
    return r"tokenizer.json is missing or changed"


def with_no_training_documents(folder):
    raw = json.loads((folder / MANIFEST).read_text())
    raw["splits"]["train"] = []
    (folder / MANIFEST).write_text(json.dumps(raw))
    return r"training split of .* is empty"


FAULTS = [value for name, value in sorted(globals().items()) if name.startswith("with_")]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_shards_is_named(folder, fault):
    check_shards(folder, Manifest.load(folder))
    message = fault(folder)
    with pytest.raises(DataError, match=message):
        check_shards(folder, Manifest.load(folder))


def test_damage_that_the_footer_does_not_show_is_found_when_it_is_read(folder):
    content = bytearray((folder / SHARD).read_bytes())
    content[200] ^= 1
    (folder / SHARD).write_bytes(content)
    check_shards(folder, Manifest.load(folder))
    with pytest.raises(DataError, match="row group 0 of .*train-00000.parquet is damaged"):
        WindowReader(folder, "train", 20).read(np.arange(3))


def test_lengths_that_do_not_add_up_are_refused(folder):
    table = pq.read_table(folder / SHARD)
    lengths = table.column("length").to_numpy().copy()
    lengths[0] += 3
    pq.write_table(table.set_column(1, "length", pa.array(lengths)), folder / SHARD)
    with pytest.raises(DataError, match=r"document lengths of the train split is \d+ tokens in all; the manifest says"):
        packing_index(folder, Manifest.load(folder), "train", 20)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no manifest.json"), ("{", "manifest.json is broken"), ('{"format": 99}', "is 99; this version reads 1"), ("[]", "is broken"), ('{"format": 1, "splits": {}}', "is broken")],
)
def test_a_folder_without_a_good_manifest_is_refused_with_the_command_to_type(tmp_path, content, message):
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(DataError, match=f"{message}.*rayzero3 tokenize"):
        Manifest.load(tmp_path)
    with pytest.raises(DataError, match="missing.*rayzero3 tokenize"):
        Manifest.load(tmp_path / "nowhere")


def test_a_split_too_small_for_one_sample_says_how_many_tokens_there_are(folder):
    with pytest.raises(DataError, match=r"data.sequence_length of the validation split is 10000000; it has \d+ tokens"):
        packing_index(folder, Manifest.load(folder), "validation", 10**7)


def test_the_packing_index_is_kept_and_a_stale_or_damaged_one_is_built_anew(folder):
    manifest = Manifest.load(folder)
    built = packing_index(folder, manifest, "train", 16)
    (kept,) = folder.glob("packing-train-16.npz")
    for damage in (lambda: kept.write_bytes(b"rubbish"), lambda: kept.write_bytes(b""), lambda: os.truncate(kept, 500), lambda: np.savez(kept, key="other", lengths=[1]), lambda: None):
        damage()
        again = packing_index(folder, manifest, "train", 16)
        assert np.array_equal(again.first_document, built.first_document) and np.array_equal(again.first_offset, built.first_offset)


def test_a_read_only_folder_is_packed_without_keeping_the_index(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    manifest = Manifest.load(folder)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(type(folder), "unlink", refuse)
    assert len(packing_index(folder, manifest, "train", 19)) == (manifest.tokens("train") - 1) // 19
    assert not list(folder.glob("packing-train-19*"))


def test_the_reader_returns_the_documents_stream(folder):
    manifest = Manifest.load(folder)
    stream = np.concatenate(
        [np.array(row.as_py()) for shard in manifest.splits["train"] for row in pq.read_table(folder / shard.file).column("tokens")]
    )
    reader = WindowReader(folder, "train", 50)
    assert len(stream) == manifest.tokens("train") and reader.num_samples == (len(stream) - 1) // 50
    ids = np.array([reader.num_samples - 1, 0, -1, reader.num_samples // 2])
    rows = reader.read(ids)
    assert rows.dtype == np.int32 and (rows[2] == NO_TOKEN).all()
    for row, sample in zip(rows, ids, strict=True):
        if sample >= 0:
            assert np.array_equal(row, stream[sample * 50 : sample * 50 + 51])
